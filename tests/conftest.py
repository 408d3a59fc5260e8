"""One thread a process, as workers run by default."""

import torch

torch.set_num_threads(1)
