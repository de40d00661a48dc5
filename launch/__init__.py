"""The training example: `launch/local.sh` prepares the data and starts `launch/train.py` on several processes."""

import logging
import warnings

# Megatron warns in every process about each optional package that it does without (README.md says which and what for).
warnings.filterwarnings('ignore', category=UserWarning, module=r'megatron\.core\.')
# PyTorch warns in every process about a CUDA compiler without a GPU.
logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)
