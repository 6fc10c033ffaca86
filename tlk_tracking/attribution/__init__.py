"""From a Kineto trace and the rows of ATen calls to a KernelAnnotation."""
