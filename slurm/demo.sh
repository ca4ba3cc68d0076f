#!/usr/bin/env bash
# What a preemption looks like: a real Slurm on this machine, a run of four processes on two nodes, a job of a higher
# partition that takes the nodes away, the requeue, the resume. Needs `pithtrain` on PATH; takes two to three minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }
field() { pithtrain status "$name" --json | python3 -c "import json, sys; print(json.load(sys.stdin)[0]['$1'])"; }
until_() { for _ in $(seq 240); do "$@" && return; sleep 0.5; done; echo "it took too long: $*" >&2; exit 1; }
at_least() { [ "$(field step)" != None ] && [ "$(field step)" -ge "$1" ]; }
is() { [ "$(field word)" = "$1" ]; }

[ -e data/stdlib/tokenizer.json ] || make setup
if [ -z "${SLURM_CONF:-}" ]; then
    make -s cluster-status | grep -q ^up || trap 'say make -s cluster-down' EXIT  # one that was up stays up
    say make -s cluster-up
    export SLURM_CONF=~/.pithtrain/cluster/slurm.conf
fi
export PATH="$PATH:/usr/sbin"
name=demo-slurm-$(date +%H%M%S)
say pithtrain submit configs/tiny.yaml --name "$name" --set training.max_steps=60 --set slurm.nodes=2 \
    --set slurm.gpus_per_node=2 --set slurm.partition=train --set slurm.signal_delay_s=60
until_ at_least 10
say pithtrain status "$name"
echo; echo "a job of the partition high takes both nodes away:"
say sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap "sleep 5"
until_ is pending
say pithtrain status "$name"
echo; echo "Slurm lets a requeued job wait two minutes; \`resume\` starts it now:"
until_ pithtrain resume "$name"
until_ is done
say pithtrain status "$name"
echo; echo "each step once, over both attempts:"
python3 - "runs/$name/metrics.jsonl" << 'END'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1])]
assert [row["step"] for row in steps] == list(range(1, 61))
for attempt in sorted({row["attempt"] for row in steps}):
    mine = [row for row in steps if row["attempt"] == attempt]
    print(f"attempt {attempt}: steps {mine[0]['step']} to {mine[-1]['step']}, loss {mine[0]['loss']:.3f} to {mine[-1]['loss']:.3f}")
END
