"""Pretrain a GPT: `torchrun --nproc-per-node N pretrain_gpt.py --config FILE.yaml [flags]`, or plain python for one process."""

import sys

from megatron.training.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
