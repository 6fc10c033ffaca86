"""Between KernelAnnotations and MLflow runs."""
