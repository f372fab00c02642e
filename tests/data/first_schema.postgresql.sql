-- The same as first_schema.sqlite.sql, PostgreSQL.
CREATE TABLE public.archsearch_alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.archsearch_attempts (
    id integer NOT NULL,
    trial_id integer NOT NULL,
    attempt integer NOT NULL,
    token character varying(64) NOT NULL,
    state character varying(16) NOT NULL,
    node character varying(255),
    pid integer,
    device_model character varying(255),
    started_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    failure character varying(32),
    message text NOT NULL,
    late_answer json
);
CREATE SEQUENCE public.archsearch_attempts_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_attempts_id_seq OWNED BY public.archsearch_attempts.id;
CREATE TABLE public.archsearch_evaluations (
    id integer NOT NULL,
    arch_hash character varying(64) NOT NULL,
    recipe_hash character varying(64) NOT NULL,
    evaluation json NOT NULL,
    weights_path text,
    weights_sha256 character varying(64),
    created_at timestamp with time zone NOT NULL
);
CREATE SEQUENCE public.archsearch_evaluations_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_evaluations_id_seq OWNED BY public.archsearch_evaluations.id;
CREATE TABLE public.archsearch_profiles (
    id integer NOT NULL,
    arch_hash character varying(64) NOT NULL,
    device_model character varying(255) NOT NULL,
    profile_key character varying(64) NOT NULL,
    profile json NOT NULL,
    created_at timestamp with time zone NOT NULL
);
CREATE SEQUENCE public.archsearch_profiles_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_profiles_id_seq OWNED BY public.archsearch_profiles.id;
CREATE TABLE public.archsearch_rungs (
    id integer NOT NULL,
    attempt_id integer NOT NULL,
    rung integer NOT NULL,
    report json NOT NULL
);
CREATE SEQUENCE public.archsearch_rungs_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_rungs_id_seq OWNED BY public.archsearch_rungs.id;
CREATE TABLE public.archsearch_studies (
    id integer NOT NULL,
    name character varying(255) NOT NULL,
    spec json NOT NULL,
    identity character varying(64) NOT NULL,
    plugins json NOT NULL,
    sampler json NOT NULL,
    created_at timestamp with time zone NOT NULL,
    stop_reason character varying(64),
    seconds_run double precision NOT NULL,
    reference json NOT NULL,
    device_model character varying(255),
    lease_token character varying(64),
    lease_holder json,
    lease_until timestamp with time zone
);
CREATE SEQUENCE public.archsearch_studies_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_studies_id_seq OWNED BY public.archsearch_studies.id;
CREATE TABLE public.archsearch_trials (
    id integer NOT NULL,
    study_id integer NOT NULL,
    number integer NOT NULL,
    state character varying(16) NOT NULL,
    arch_hash character varying(64) NOT NULL,
    arch json NOT NULL,
    params json NOT NULL,
    sampler_notes json NOT NULL,
    metrics json NOT NULL,
    violations json NOT NULL,
    duplicate_of integer,
    failure character varying(32),
    message text NOT NULL,
    traceback text NOT NULL,
    proposed_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    optuna_number integer,
    from_cache boolean NOT NULL,
    evaluation_id integer,
    profile_id integer,
    published_at timestamp with time zone
);
CREATE SEQUENCE public.archsearch_trials_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.archsearch_trials_id_seq OWNED BY public.archsearch_trials.id;
ALTER TABLE ONLY public.archsearch_attempts ALTER COLUMN id SET DEFAULT nextval('public.archsearch_attempts_id_seq'::regclass);
ALTER TABLE ONLY public.archsearch_evaluations ALTER COLUMN id SET DEFAULT nextval('public.archsearch_evaluations_id_seq'::regclass);
ALTER TABLE ONLY public.archsearch_profiles ALTER COLUMN id SET DEFAULT nextval('public.archsearch_profiles_id_seq'::regclass);
ALTER TABLE ONLY public.archsearch_rungs ALTER COLUMN id SET DEFAULT nextval('public.archsearch_rungs_id_seq'::regclass);
ALTER TABLE ONLY public.archsearch_studies ALTER COLUMN id SET DEFAULT nextval('public.archsearch_studies_id_seq'::regclass);
ALTER TABLE ONLY public.archsearch_trials ALTER COLUMN id SET DEFAULT nextval('public.archsearch_trials_id_seq'::regclass);
INSERT INTO public.archsearch_alembic_version VALUES ('0001');
INSERT INTO public.archsearch_attempts VALUES (2, 2, 1, '4895270a9f4a4ba0b10253f859a40ef3', 'failed', NULL, NULL, NULL, '2026-12-02 23:34:14.529303+00', '2026-12-02 23:34:14.605992+00', 'lost', 'The worker died unexpectedly while executing this task. Check python-core-worker-*.log files for more information.', NULL);
INSERT INTO public.archsearch_attempts VALUES (1, 1, 1, '4e6e6682b1604d9799e2cbd8e0a77bd7', 'done', 'worker-1', 15487, 'pretended device', '2026-12-02 23:34:14.493393+00', '2026-12-02 23:34:14.638853+00', NULL, '', NULL);
INSERT INTO public.archsearch_attempts VALUES (3, 2, 2, '186879e9d4654f5684f22d2195b3f9c5', 'done', 'worker-1', 15384, 'pretended device', '2026-12-02 23:34:14.621485+00', '2026-12-02 23:34:14.749735+00', NULL, '', NULL);
INSERT INTO public.archsearch_attempts VALUES (4, 3, 1, '81ac359cae824bc6b70ae7127323f5b8', 'failed', 'worker-1', 15384, 'pretended device', '2026-12-02 23:34:14.733909+00', '2026-12-02 23:34:14.819263+00', 'diverged', 'as ordered', NULL);
INSERT INTO public.archsearch_attempts VALUES (5, 4, 1, '468dc875baae49ef9f50cc3a5d70d8f9', 'done', 'worker-1', 15384, 'pretended device', '2026-12-02 23:34:14.799022+00', '2026-12-02 23:34:14.898913+00', NULL, '', NULL);
INSERT INTO public.archsearch_evaluations VALUES (1, '6e81d31aeffc3c7a', 'ce1d7b834f90cb31', '{"arch_hash": "6e81d31aeffc3c7a", "recipe_hash": "ce1d7b834f90cb31", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.997785146114832, "report_recall": 0.997785146114832, "report_by_segment": {"L32K4": 0.997785146114832}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.997785146114832, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.997785146114832}, "recall_by_length": {"32": 0.997785146114832}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}', '/home/me/study/weights/6e81d31aeffc3c7a-ce1d7b834f90cb31.safetensors', '9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c', '2026-12-02 23:34:14.632622+00');
INSERT INTO public.archsearch_evaluations VALUES (2, 'aa2ff36a1618207b', 'ce1d7b834f90cb31', '{"arch_hash": "aa2ff36a1618207b", "recipe_hash": "ce1d7b834f90cb31", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.10548539392312183, "report_recall": 0.10548539392312183, "report_by_segment": {"L32K4": 0.10548539392312183}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.10548539392312183, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.10548539392312183}, "recall_by_length": {"32": 0.10548539392312183}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}', '/home/me/study/weights/aa2ff36a1618207b-ce1d7b834f90cb31.safetensors', '9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c', '2026-12-02 23:34:14.742497+00');
INSERT INTO public.archsearch_evaluations VALUES (3, 'd265e3cc987c6ede', 'ce1d7b834f90cb31', '{"arch_hash": "d265e3cc987c6ede", "recipe_hash": "ce1d7b834f90cb31", "members": [{"learning_rate": 0.001, "seed": 0, "diverged": false, "train_loss": 0.5, "selection_recall": 0.2137018256386979, "report_recall": 0.2137018256386979, "report_by_segment": {"L32K4": 0.2137018256386979}}], "rungs": [{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}], "learning_rate": 0.001, "recall": 0.2137018256386979, "recall_spread": 0.0, "recall_by_pairs": {"4": 0.2137018256386979}, "recall_by_length": {"32": 0.2137018256386979}, "diverged_members": 0, "train_seconds": 0.1, "kernel_backends": {}, "versions": {}}', '/home/me/study/weights/d265e3cc987c6ede-ce1d7b834f90cb31.safetensors', '9fbc31ca26c9b928785d3d7a2aebd3d854b04063f7e5c19e77d0894dd3cb358c', '2026-12-02 23:34:14.884646+00');
INSERT INTO public.archsearch_profiles VALUES (1, '6e81d31aeffc3c7a', 'pretended device', 'f468c762f42fa787', '{"arch_hash": "6e81d31aeffc3c7a", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}', '2026-12-02 23:34:14.637007+00');
INSERT INTO public.archsearch_profiles VALUES (2, 'aa2ff36a1618207b', 'pretended device', 'f468c762f42fa787', '{"arch_hash": "aa2ff36a1618207b", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}', '2026-12-02 23:34:14.747033+00');
INSERT INTO public.archsearch_profiles VALUES (3, 'd265e3cc987c6ede', 'pretended device', 'f468c762f42fa787', '{"arch_hash": "d265e3cc987c6ede", "device_model": "pretended device", "exclusive": false, "prefill": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "decode": [{"batch": 1, "context": 32, "median_ms": 1.5, "iqr_ms": 0.0, "repeats": 1}], "state_bytes": {}, "peak_memory_bytes": 1000, "threads": 1}', '2026-12-02 23:34:14.896727+00');
INSERT INTO public.archsearch_rungs VALUES (1, 1, 0, '{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
INSERT INTO public.archsearch_rungs VALUES (2, 3, 0, '{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
INSERT INTO public.archsearch_rungs VALUES (3, 5, 0, '{"kind": "rung", "rung": 0, "step": 1, "epoch": 1.0, "seconds": 0.1, "train_loss": [0.5], "selection_recall": [0.5]}');
INSERT INTO public.archsearch_studies VALUES (1, 'stub', '{"study": "stub", "seed": 7, "plugins": [], "model": {"width": [32], "layers": [{"options": [{"mixer": "base_conv", "fields": {"kernel": [2, 3, 4]}}, {"mixer": "sliding_window", "fields": {"window": [4, 8, 16, 32, 64, 128]}}]}], "repeat": [1], "channel_mixer": [{"kind": "none", "ratio": []}]}, "task": {"kind": "mqar", "recipe": "{\"folder\": \"/home/me/study\", \"kill_once\": [1], \"diverge\": [2]}", "vocab_size": 64, "train": [{"length": 32, "pairs": 4, "examples": 8}], "test": [{"length": 32, "pairs": 4, "examples": 8}], "power_a": 0.01, "random_filler": true, "seed": 0}, "train": {"learning_rates": [0.001], "seeds": 1, "epochs": 1, "batch_size": 8, "test_batch_size": 8, "weight_decay": 0.1, "betas": [0.9, 0.999], "grad_clip": null, "schedule": "cosine_per_epoch", "warmup_steps": 0, "embed_dropout": 0.0, "precision": "fp32", "rungs": 1}, "objectives": [{"metric": "recall", "direction": "maximize", "context": null, "batch": null, "reference": null}, {"metric": "state_bytes", "direction": "minimize", "context": null, "batch": null, "reference": null}], "limits": [{"metric": "state_bytes", "maximum": 200000.0, "context": null, "batch": null}], "search": {"sampler": "random", "trials": 4, "time_s": null, "warm_start": []}, "resources": {"gpus": 0.0, "cpus": 1, "device": null, "parallel": 2, "trial_timeout_s": 60.0, "attempts": 3}, "tracking": {"storage": "postgresql+psycopg://archsearch@127.0.0.1:54437/postgres", "mlflow": null, "weights": "/home/me/study/weights"}}', 'c4c2ff0a452aa85f', '[]', '{"name": "random"}', '2026-12-02 23:34:14.231448+00', 'trials', 0.7391868330000761, '{"recall": 0.0, "state_bytes": 400000.0}', 'pretended device', NULL, 'null', NULL);
INSERT INTO public.archsearch_trials VALUES (1, 1, 0, 'complete', '6e81d31aeffc3c7a', '{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"heads": 1, "kv_heads": 0, "qk_norm": false, "rope": false, "rope_base": 10000.0, "window": 16}, "mixer": "sliding_window"}], "width": 32}', '{"layer0.mixer": "sliding_window", "layer0.sliding_window.window": 16}', '{"trial": {}, "study": {}}', '{"state_bytes": 4104.0, "parameters": 6272.0, "flops_per_token": 13856.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.997785146114832}', '[]', NULL, NULL, '', '', '2026-12-02 23:34:14.424533+00', '2026-12-02 23:34:14.638853+00', 0, false, 1, 1, NULL);
INSERT INTO public.archsearch_trials VALUES (2, 1, 1, 'complete', 'aa2ff36a1618207b', '{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"heads": 1, "kv_heads": 0, "qk_norm": false, "rope": false, "rope_base": 10000.0, "window": 8}, "mixer": "sliding_window"}], "width": 32}', '{"layer0.mixer": "sliding_window", "layer0.sliding_window.window": 8}', '{"trial": {}, "study": {}}', '{"state_bytes": 2056.0, "parameters": 6272.0, "flops_per_token": 13200.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.10548539392312183}', '[]', NULL, NULL, '', '', '2026-12-02 23:34:14.505564+00', '2026-12-02 23:34:14.749735+00', 1, false, 2, 2, NULL);
INSERT INTO public.archsearch_trials VALUES (3, 1, 2, 'failed', 'dd42ece1f4b0a55f', '{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"expand": 2, "form": "zoology", "kernel": 4}, "mixer": "base_conv"}], "width": 32}', '{"layer0.mixer": "base_conv", "layer0.base_conv.kernel": 4}', '{"trial": {}, "study": {}}', '{"state_bytes": 384.0, "parameters": 3392.0, "flops_per_token": 6496.0}', '[]', NULL, 'diverged', 'as ordered', '', '2026-12-02 23:34:14.53618+00', '2026-12-02 23:34:14.815047+00', 2, false, NULL, NULL, NULL);
INSERT INTO public.archsearch_trials VALUES (4, 1, 3, 'complete', 'd265e3cc987c6ede', '{"channel_mixer": {"kind": "none", "ratio": 0.0}, "layers": [{"fields": {"expand": 2, "form": "zoology", "kernel": 3}, "mixer": "base_conv"}], "width": 32}', '{"layer0.mixer": "base_conv", "layer0.base_conv.kernel": 3}', '{"trial": {}, "study": {}}', '{"state_bytes": 256.0, "parameters": 3360.0, "flops_per_token": 6432.0, "decode_ms": 1.5, "peak_memory_bytes": 1000.0, "prefill_ms": 1.5, "recall": 0.2137018256386979}', '[]', NULL, NULL, '', '', '2026-12-02 23:34:14.559909+00', '2026-12-02 23:34:14.898913+00', 3, false, 3, 3, NULL);
SELECT pg_catalog.setval('public.archsearch_attempts_id_seq', 5, true);
SELECT pg_catalog.setval('public.archsearch_evaluations_id_seq', 3, true);
SELECT pg_catalog.setval('public.archsearch_profiles_id_seq', 3, true);
SELECT pg_catalog.setval('public.archsearch_rungs_id_seq', 3, true);
SELECT pg_catalog.setval('public.archsearch_studies_id_seq', 1, true);
SELECT pg_catalog.setval('public.archsearch_trials_id_seq', 4, true);
ALTER TABLE ONLY public.archsearch_alembic_version
    ADD CONSTRAINT archsearch_alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.archsearch_attempts
    ADD CONSTRAINT archsearch_attempts_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_attempts
    ADD CONSTRAINT archsearch_attempts_token_key UNIQUE (token);
ALTER TABLE ONLY public.archsearch_evaluations
    ADD CONSTRAINT archsearch_evaluations_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_profiles
    ADD CONSTRAINT archsearch_profiles_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_rungs
    ADD CONSTRAINT archsearch_rungs_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_studies
    ADD CONSTRAINT archsearch_studies_name_key UNIQUE (name);
ALTER TABLE ONLY public.archsearch_studies
    ADD CONSTRAINT archsearch_studies_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_trials
    ADD CONSTRAINT archsearch_trials_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.archsearch_attempts
    ADD CONSTRAINT uq_archsearch_attempts UNIQUE (trial_id, attempt);
ALTER TABLE ONLY public.archsearch_evaluations
    ADD CONSTRAINT uq_archsearch_evaluations UNIQUE (arch_hash, recipe_hash);
ALTER TABLE ONLY public.archsearch_profiles
    ADD CONSTRAINT uq_archsearch_profiles UNIQUE (arch_hash, device_model, profile_key);
ALTER TABLE ONLY public.archsearch_rungs
    ADD CONSTRAINT uq_archsearch_rungs UNIQUE (attempt_id, rung);
ALTER TABLE ONLY public.archsearch_trials
    ADD CONSTRAINT uq_archsearch_trials UNIQUE (study_id, number);
CREATE INDEX ix_archsearch_trials_arch_hash ON public.archsearch_trials USING btree (study_id, arch_hash);
ALTER TABLE ONLY public.archsearch_attempts
    ADD CONSTRAINT archsearch_attempts_trial_id_fkey FOREIGN KEY (trial_id) REFERENCES public.archsearch_trials(id);
ALTER TABLE ONLY public.archsearch_rungs
    ADD CONSTRAINT archsearch_rungs_attempt_id_fkey FOREIGN KEY (attempt_id) REFERENCES public.archsearch_attempts(id);
ALTER TABLE ONLY public.archsearch_trials
    ADD CONSTRAINT archsearch_trials_evaluation_id_fkey FOREIGN KEY (evaluation_id) REFERENCES public.archsearch_evaluations(id);
ALTER TABLE ONLY public.archsearch_trials
    ADD CONSTRAINT archsearch_trials_profile_id_fkey FOREIGN KEY (profile_id) REFERENCES public.archsearch_profiles(id);
ALTER TABLE ONLY public.archsearch_trials
    ADD CONSTRAINT archsearch_trials_study_id_fkey FOREIGN KEY (study_id) REFERENCES public.archsearch_studies(id);
