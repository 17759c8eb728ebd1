"""Plans: prepared, run, bound, launched directly, and kept under way in pipelines."""
