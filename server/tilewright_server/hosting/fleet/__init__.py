"""Compiled kernels and measurements that servers share through object storage."""
