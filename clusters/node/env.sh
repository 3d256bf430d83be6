# Environment of every shell on a node, and so of Ray and its runs. Sourced by ~/.bashrc.
export PATH="$HOME/raytrain-gpt/bin:$PATH"
# Ray rejects calls without the token in ~/.ray/auth_token.
export RAY_AUTH_MODE=token
# `ray job stop` waits this many seconds for the checkpoint; Ray's default of 3 is too short.
export RAY_JOB_STOP_WAIT_TIME_S=120
# Use the interface of the default route. Otherwise NCCL might use docker0, and gloo the address to which
# the hostname resolves. On Debian this is 127.0.1.1, and ranks on different hosts cannot connect.
interface=$(ip -o -4 route show to default | awk '{print $5; exit}')
export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"
# Make NCCL log why a call failed.
export NCCL_DEBUG=WARN
