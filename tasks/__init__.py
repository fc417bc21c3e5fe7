"""Prefect tasks, one verb a file, and below them adapters (impure) and the pure core."""
