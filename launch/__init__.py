"""The training example: `launch/local.sh` prepares the data and starts `launch/train.py` under torchrun."""
