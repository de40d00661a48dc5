"""As tests/conftest.py: no OMP thread may start before ranks are forked."""

import os

os.environ['OMP_NUM_THREADS'] = '1'

import torch

torch.set_num_threads(1)
