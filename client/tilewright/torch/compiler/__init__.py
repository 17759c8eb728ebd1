"""The backend ``tilewright`` of ``torch.compile``."""
