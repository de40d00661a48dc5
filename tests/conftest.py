"""Threads for all tests: no OMP thread may start before ranks are forked (tests/parallel/ranks.py)."""

import os

os.environ['OMP_NUM_THREADS'] = '1'
os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'  # in-process: a pool of compile workers would not survive a fork

import torch

torch.set_num_threads(1)
