"""Requirements of kernels on the tensors of a problem, and the copies that meet them."""
