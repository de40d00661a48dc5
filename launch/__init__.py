"""The training example: `launch/local.sh` prepares the data and starts `launch/train.py` on several processes."""

import warnings

# Megatron warns in every process about each optional package that it does without (README.md says which and what for).
warnings.filterwarnings('ignore', category=UserWarning, module=r'megatron\.core\.')
