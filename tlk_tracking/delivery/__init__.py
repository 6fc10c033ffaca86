"""From a raw window on disk to its MLflow run, in a process of its own."""
