"""Flows: orchestration only. Read them first; each calls verbs of tasks/."""
