#!/usr/bin/env bash
# Run `raytrain-gpt node` on a spot machine: spot-node.sh aws|gcp FLAGS OF RAYTRAIN-GPT NODE.
# Sends the node SIGTERM when the cloud gives notice (AWS 2 min ahead, GCP 30 s).
set -u
cloud=$1
shift
aws=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}/latest
gcp=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1

notice() {
  case $cloud in
  aws)
    local token
    token=$(curl -sf -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$aws/api/token") &&
      curl -sf -m 2 -o /dev/null -H "X-aws-ec2-metadata-token: $token" "$aws/meta-data/spot/instance-action"
    ;;
  gcp)
    [ "$(curl -sf -m 2 -H 'Metadata-Flavor: Google' "$gcp/instance/preempted")" = TRUE ]
    ;;
  esac
}

raytrain-gpt node "$@" &
node=$!
trap 'kill -TERM $node' TERM INT # sent manually, or at machine shutdown
while kill -0 $node 2> /dev/null; do
  if notice; then
    echo "$cloud takes this machine away"
    kill -TERM $node
    break
  fi
  sleep 2
done
wait $node
code=$?
while kill -0 $node 2> /dev/null; do # a signal interrupted the wait
  wait $node
  code=$?
done
exit $code
