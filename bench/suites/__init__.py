"""Suites that ``bench/run.py`` runs, each in a process of its own."""
