"""Fixtures that several kinds of tests share."""

import os

# Tests call nobody home, whatever machine they run on.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
for variable in [name for name in os.environ if name.startswith(("RANKWATCH_", "RAY_TRAIN_", "NCCL_"))]:
    del os.environ[variable]
