#!/usr/bin/env bash
# Install the wheel of ~/raytrain-gpt-dist, with the versions it was tested with, in ~/raytrain-gpt.
set -euo pipefail
setup=$(cd "$(dirname "$0")" && pwd)
home=~/raytrain-gpt
dist=~/raytrain-gpt-dist

chmod 600 ~/.ray/auth_token
[ -x "$home/bin/python" ] || python3 -m venv "$home"
wheel=$(ls -t "$dist"/*.whl | head -n 1) # older wheels may be there as well
"$home/bin/pip" install -q -c "$dist/constraints.txt" "$wheel"
"$home/bin/pip" install -q --no-deps --force-reinstall "$wheel" # a rebuilt wheel has the same version

grep -qsF "$setup/env.sh" ~/.bashrc || echo ". $setup/env.sh" >> ~/.bashrc
