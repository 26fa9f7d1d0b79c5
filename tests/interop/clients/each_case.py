# mypy: ignore-errors
"""Runs a program once for each case, in processes forked from this one, which has imported the client.

Arguments: the program, the module to import, and a JSON list of cases. Each process prints a line.
"""

import json
import os
import runpy
import sys
from importlib import import_module

program, module, cases = sys.argv[1:]
import_module(module)
for case in json.loads(cases):
    child = os.fork()
    if not child:
        sys.argv = [program, json.dumps(case)]
        runpy.run_path(program, run_name="__main__")
        sys.stdout.write("\n")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed with {case}")
