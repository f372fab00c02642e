-- A database of the first schema, SQLite: four trials of a pretended study, one of them failed.
CREATE TABLE archsearch_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT archsearch_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "archsearch_alembic_version" VALUES('0001');
CREATE TABLE archsearch_attempts (
	id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	token VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	node VARCHAR(255), 
	pid INTEGER, 
	device_model VARCHAR(255), 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	failure VARCHAR(32), 
	message TEXT NOT NULL, 
	late_answer JSON, 
	PRIMARY KEY (id), 
	CONSTRAINT uq_archsearch_attempts UNIQUE (trial_id, attempt), 
	FOREIGN KEY(trial_id) REFERENCES archsearch_trials (id), 
	UNIQUE (token)
);
INSERT INTO "archsearch_attempts" VALUES(1,1,1,'f437149aef7e4b6cb027c11274dd4b99','done','worker-1',15384,'pretended device','2026-12-02 23:34:06.567581','2026-12-02 23:34:10.792743',NULL,'',NULL);
INSERT INTO "archsearch_attempts" VALUES(2,2,1,'2e41090cf66045d3a7797683dd30cef9','failed',NULL,NULL,NULL,'2026-12-02 23:34:06.671168','2026-12-02 23:34:09.893389','lost','The worker died unexpectedly while executing this task. Check python-core-worker-*.log files for more information.',NULL);
INSERT INTO "archsearch_attempts" VALUES(3,2,2,'444997819c1c47a8abf41ce9ba4098da','done','worker-1',15487,'pretended device','2026-12-02 23:34:09.896639','2026-12-02 23:34:12.580762',NULL,'',NULL);
INSERT INTO "archsearch_attempts" VALUES(4,3,1,'3aa04f2d46d943f7ac58a763cfa8ab2d','failed','worker-1',15384,'pretended device','2026-12-02 23:34:10.824833','2026-12-02 23:34:10.836257','diverged','as ordered',NULL);
INSERT INTO "archsearch_attempts" VALUES(5,4,1,'9b705529ed95468db8c0dce45b83edda','done','worker-1',15384,'pretended device','2026-12-02 23:34:10.846539','2026-12-02 23:34:10.883824',NULL,'',NULL);
CREATE TABLE archsearch_evaluations (
	id INTEGER NOT NULL, 
	arch_hash VARCHAR(64) NOT NULL, 
	recipe_hash VARCHAR(64) NOT NULL, 
	evaluation JSON NOT NULL, 
	weights_path TEXT, 
	weights_sha256 VARCHAR(64), 
	created_at DATETIME NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT uq_archsearch_evaluations UNIQUE (arch_hash, recipe_hash)
);
INSERT INTO "archsearch_evaluations" VALUES(1,'6e81d31aeffc3c7a','3ea9e83019854856','{"arch_hash": "6e81d31aeffc3c7a", "recipe_hash": "3ea9e83019854856", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.997785146114832, "report_recall": 0.997785146114832, "report_by_segment": {"L32K4": 0.997785146114832}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.997785146114832, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.997785146114832}, "recall_by_length": {"32": 0.997785146114832}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}','/home/me/study/weights/6e81d31aeffc3c7a-3ea9e83019854856.safetensors','9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c','2026-12-02 23:34:10.786358');
INSERT INTO "archsearch_evaluations" VALUES(2,'d265e3cc987c6ede','3ea9e83019854856','{"arch_hash": "d265e3cc987c6ede", "recipe_hash": "3ea9e83019854856", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.2137018256386979, "report_recall": 0.2137018256386979, "report_by_segment": {"L32K4": 0.2137018256386979}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.2137018256386979, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.2137018256386979}, "recall_by_length": {"32": 0.2137018256386979}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}','/home/me/study/weights/d265e3cc987c6ede-3ea9e83019854856.safetensors','9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c','2026-12-02 23:34:10.881245');
INSERT INTO "archsearch_evaluations" VALUES(3,'aa2ff36a1618207b','3ea9e83019854856','{"arch_hash": "aa2ff36a1618207b", "recipe_hash": "3ea9e83019854856", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.10548539392312183, "report_recall": 0.10548539392312183, "report_by_segment": {"L32K4": 0.10548539392312183}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.10548539392312183, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.10548539392312183}, "recall_by_length": {"32": 0.10548539392312183}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}','/home/me/study/weights/aa2ff36a1618207b-3ea9e83019854856.safetensors','9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c','2026-12-02 23:34:12.577464');
CREATE TABLE archsearch_profiles (
	id INTEGER NOT NULL, 
	arch_hash VARCHAR(64) NOT NULL, 
	device_model VARCHAR(255) NOT NULL, 
	profile_key VARCHAR(64) NOT NULL, 
	profile JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT uq_archsearch_profiles UNIQUE (arch_hash, device_model, profile_key)
);
INSERT INTO "archsearch_profiles" VALUES(1,'6e81d31aeffc3c7a','pretended device','f468c762f42fa787','{"arch_hash": "6e81d31aeffc3c7a", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}','2026-12-02 23:34:10.791007');
INSERT INTO "archsearch_profiles" VALUES(2,'d265e3cc987c6ede','pretended device','f468c762f42fa787','{"arch_hash": "d265e3cc987c6ede", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}','2026-12-02 23:34:10.883153');
INSERT INTO "archsearch_profiles" VALUES(3,'aa2ff36a1618207b','pretended device','f468c762f42fa787','{"arch_hash": "aa2ff36a1618207b", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}','2026-12-02 23:34:12.580025');
CREATE TABLE archsearch_rungs (
	id INTEGER NOT NULL, 
	attempt_id INTEGER NOT NULL, 
	rung INTEGER NOT NULL, 
	report JSON NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT uq_archsearch_rungs UNIQUE (attempt_id, rung), 
	FOREIGN KEY(attempt_id) REFERENCES archsearch_attempts (id)
);
INSERT INTO "archsearch_rungs" VALUES(1,1,0,'{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
INSERT INTO "archsearch_rungs" VALUES(2,5,0,'{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
INSERT INTO "archsearch_rungs" VALUES(3,3,0,'{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
CREATE TABLE archsearch_studies (
	id INTEGER NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	spec JSON NOT NULL, 
	identity VARCHAR(64) NOT NULL, 
	plugins JSON NOT NULL, 
	sampler JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	stop_reason VARCHAR(64), 
	seconds_run FLOAT NOT NULL, 
	reference JSON NOT NULL, 
	device_model VARCHAR(255), 
	lease_token VARCHAR(64), 
	lease_holder JSON, 
	lease_until DATETIME, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "archsearch_studies" VALUES(1,'stub','{"study": "stub", "seed": 7, "plugins": [], "model": {"width": [32], "layers": [{"options": [{"mixer": "base_conv", "fields": {"kernel": [2, 3, 4]}}, {"mixer": "sliding_window", "fields": {"window": [4, 8, 16, 32, 64, 128]}}]}], "repeat": [1], "channel_mixer": [{"kind": "none", "ratio": []}]}, "task": {"kind": "mqar", "recipe": "{\"folder\": \"/home/me/study\", \"kill_once\": [1], \"diverge\": [2]}", "vocab_size": 64, "train": [{"length": 32, "pairs": 4, "examples": 8}], "test": [{"length": 32, "pairs": 4, "examples": 8}], "power_a": 0.01, "random_filler": true, "seed": 0}, "train": {"learning_rates": [0.001], "seeds": 1, "epochs": 1, "batch_size": 8, "test_batch_size": 8, "weight_decay": 0.1, "betas": [0.9, 0.999], "grad_clip": null, "schedule": "cosine_per_epoch", "warmup_steps": 0, "embed_dropout": 0.0, "precision": "fp32", "rungs": 1}, "objectives": [{"metric": "recall", "direction": "maximize", "context": null, "batch": null, "reference": null}, {"metric": "state_bytes", "direction": "minimize", "context": null, "batch": null, "reference": null}], "limits": [{"metric": "state_bytes", "maximum": 200000.0, "context": null, "batch": null}], "search": {"sampler": "random", "trials": 4, "time_s": null, "warm_start": []}, "resources": {"gpus": 0.0, "cpus": 1, "device": null, "parallel": 2, "trial_timeout_s": 60.0, "attempts": 3}, "tracking": {"storage": "sqlite:////home/me/study/archsearch.db", "mlflow": null, "weights": "/home/me/study/weights"}}','a91f3d7bdc585ff2','[]','{"name": "random"}','2026-12-02 23:34:04.111111','trials',8.47300963099996806704e+00,'{"recall": 0.0, "state_bytes": 400000.0}','pretended device',NULL,'null',NULL);
CREATE TABLE archsearch_trials (
	id INTEGER NOT NULL, 
	study_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	arch_hash VARCHAR(64) NOT NULL, 
	arch JSON NOT NULL, 
	params JSON NOT NULL, 
	sampler_notes JSON NOT NULL, 
	metrics JSON NOT NULL, 
	violations JSON NOT NULL, 
	duplicate_of INTEGER, 
	failure VARCHAR(32), 
	message TEXT NOT NULL, 
	traceback TEXT NOT NULL, 
	proposed_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	optuna_number INTEGER, 
	from_cache BOOLEAN NOT NULL, 
	evaluation_id INTEGER, 
	profile_id INTEGER, 
	published_at DATETIME, 
	PRIMARY KEY (id), 
	CONSTRAINT uq_archsearch_trials UNIQUE (study_id, number), 
	FOREIGN KEY(study_id) REFERENCES archsearch_studies (id), 
	FOREIGN KEY(evaluation_id) REFERENCES archsearch_evaluations (id), 
	FOREIGN KEY(profile_id) REFERENCES archsearch_profiles (id)
);
INSERT INTO "archsearch_trials" VALUES(1,1,0,'complete','6e81d31aeffc3c7a','{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"heads": 1, "kv_heads": 0, "qk_norm": false, "rope": false, "rope_base": 10000.0, "window": 16}, "mixer": "sliding_window"}], "width": 32}','{"layer0.mixer": "sliding_window", "layer0.sliding_window.window": 16}','{"trial": {}, "study": {}}','{"state_bytes": 4104.0, "parameters": 6272.0, "flops_per_token": 13856.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.997785146114832}','[]',NULL,NULL,'','','2026-12-02 23:34:06.538349','2026-12-02 23:34:10.792743',0,0,1,1,NULL);
INSERT INTO "archsearch_trials" VALUES(2,1,1,'complete','aa2ff36a1618207b','{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"heads": 1, "kv_heads": 0, "qk_norm": false, "rope": false, "rope_base": 10000.0, "window": 8}, "mixer": "sliding_window"}], "width": 32}','{"layer0.mixer": "sliding_window", "layer0.sliding_window.window": 8}','{"trial": {}, "study": {}}','{"state_bytes": 2056.0, "parameters": 6272.0, "flops_per_token": 13200.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.10548539392312183}','[]',NULL,NULL,'','','2026-12-02 23:34:06.660536','2026-12-02 23:34:12.580762',1,0,3,3,NULL);
INSERT INTO "archsearch_trials" VALUES(3,1,2,'failed','dd42ece1f4b0a55f','{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"expand": 2, "form": "zoology", "kernel": 4}, "mixer": "base_conv"}], "width": 32}','{"layer0.mixer": "base_conv", "layer0.base_conv.kernel": 4}','{"trial": {}, "study": {}}','{"state_bytes": 384.0, "parameters": 3392.0, "flops_per_token": 6496.0}','[]',NULL,'diverged','as ordered','','2026-12-02 23:34:06.687762','2026-12-02 23:34:10.834992',2,0,NULL,NULL,NULL);
INSERT INTO "archsearch_trials" VALUES(4,1,3,'complete','d265e3cc987c6ede','{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"expand": 2, "form": "zoology", "kernel": 3}, "mixer": "base_conv"}], "width": 32}','{"layer0.mixer": "base_conv", "layer0.base_conv.kernel": 3}','{"trial": {}, "study": {}}','{"state_bytes": 256.0, "parameters": 3360.0, "flops_per_token": 6432.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.2137018256386979}','[]',NULL,NULL,'','','2026-12-02 23:34:06.699748','2026-12-02 23:34:10.883824',3,0,2,2,NULL);
CREATE INDEX ix_archsearch_trials_arch_hash ON archsearch_trials (study_id, arch_hash);
