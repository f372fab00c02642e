"""The contract of a mixer as tests: subclass `MixerContract`, name a mixer, get every test.

    from archsearch.testing import MixerContract

    class TestMyMixer(MixerContract):
        mixer = "my_mixer"

A mixer in a file of its own is registered first: `mixer = add_plugin_file(Path("my_mixer.py"))`.
The tests run on the CPU in seconds, and need pytest only to be collected.
"""

from archsearch.testing.contract import MixerContract

__all__ = ["MixerContract"]
