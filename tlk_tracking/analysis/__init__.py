"""From KernelAnnotations to numbers and verdicts."""
