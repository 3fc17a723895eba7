"""Train and evaluate: ``python train.py {fit,validate,test,predict}`` is ``qerl {fit,validate,test,predict}``.

Usage: python train.py fit -c configs/tasks/TASK.yaml -c configs/models/MODEL.yaml -c configs/arms/ARM.yaml
       [--run_dir DIR] [--ckpt_path last] [--KEY VALUE ...]
"""

from __future__ import annotations

import sys

try:  # Ctrl-C may come during the imports, which take seconds
    from qerl_pl.cli.training import QeRLCLI, command_line, exit_status, main

    if __name__ == "__main__":
        sys.exit(exit_status(sys.argv[1:]))
except KeyboardInterrupt:
    print("\nstopped by Ctrl-C", file=sys.stderr)
    sys.exit(130)

__all__ = ["QeRLCLI", "command_line", "exit_status", "main"]
