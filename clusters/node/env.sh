# Environment of every shell on a node, and so of Ray and its runs. Sourced by ~/.bashrc.
export PATH="$HOME/raytrain-gpt/bin:$PATH"
# Ray refuses calls without the token of ~/.ray/auth_token.
export RAY_AUTH_MODE=token
# `ray job stop` waits this many seconds for the checkpoint; Ray's default of 3 is too short.
export RAY_JOB_STOP_WAIT_TIME_S=120
# The interface of the default route. NCCL might take docker0, and gloo whatever the host's own name
# resolves to, which on Debian is 127.0.1.1: then the ranks on other hosts cannot connect.
interface=$(ip -o -4 route show to default | awk '{print $5; exit}')
export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"
# NCCL logs why a call failed.
export NCCL_DEBUG=WARN
