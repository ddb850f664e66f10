import subprocess
import sys

CODE = """
import sys
from ropewalk.workloads import arms, compare, progress, report
print(*({name.split(".")[0] for name in sys.modules} & {"ray", "vllm", "torch", "datasets"}))
"""


def test_the_generator_loads_neither_ray_nor_vllm_nor_torch():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
