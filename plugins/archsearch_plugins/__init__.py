"""Built-in mixers, one file each. The name of a file is the name of its mixer in a study."""
