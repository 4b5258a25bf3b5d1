"""For training loops that come from torch.amp and mmcv."""
