#!/usr/bin/env bash
# Install the wheel from ~/raytrain-gpt-dist in ~/raytrain-gpt, with the dependency versions of its tests.
set -euo pipefail
setup=$(cd "$(dirname "$0")" && pwd)
home=~/raytrain-gpt
dist=~/raytrain-gpt-dist

chmod 600 ~/.ray/auth_token

# torch.compile and document masks build code on the nodes.
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
if ! command -v gcc > /dev/null || ! command -v g++ > /dev/null || [ ! -f "$headers/Python.h" ]; then
  sudo apt-get update -q && sudo apt-get install -y -q gcc g++ python3-dev \
    || echo "no compiler or no headers of Python: compile and document masks will not work on this node" >&2
fi

[ -x "$home/bin/python" ] || python3 -m venv "$home"
wheel=$(ls -t "$dist"/*.whl | head -n 1) # older wheels may also be present
"$home/bin/pip" install -q -c "$dist/constraints.txt" "$wheel"
"$home/bin/pip" install -q --no-deps --force-reinstall "$wheel" # a rebuilt wheel has the same version

grep -qsF "$setup/env.sh" ~/.bashrc || echo ". $setup/env.sh" >> ~/.bashrc
