"""Run the training commands without installing the package: ``python train.py fit`` does what ``qerl fit`` does; the
other commands are validate, test and predict.

Usage: python train.py fit -c configs/tasks/TASK.yaml -c configs/models/MODEL.yaml -c configs/arms/ARM.yaml
       [--run_dir DIR] [--ckpt_path last] [--KEY VALUE ...]
"""

import sys

from qerl_pl import __main__ as program

if __name__ == "__main__":  # before the import below, which takes seconds
    sys.exit(program.main())

from qerl_pl.cli.training import QeRLCLI, command_line, exit_status, main

__all__ = ["QeRLCLI", "command_line", "exit_status", "main"]
