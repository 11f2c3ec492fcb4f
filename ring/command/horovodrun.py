"""All flags of horovodrun (Horovod 0.28.1), by its groups: what `ringlet run` is held against."""

FLAGS = {
    "general": """-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout
        --network-interfaces --network-interface --output-filename --verbose --config-file""",
    "ssh": "-p --ssh-port -i --ssh-identity-file",
    "tuneable": """--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce
        --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
        --torus-allreduce --no-torus-allreduce""",
    "autotune": """--autotune --no-autotune --autotune-log-file --autotune-warmup-samples
        --autotune-steps-per-sample --autotune-bayes-opt-max-samples
        --autotune-gaussian-process-noise""",
    "elastic": """--min-np --min-num-proc --max-np --max-num-proc --slots-per-host
        --elastic-timeout --reset-limit --blacklist-cooldown-range""",
    "timeline": "--timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles",
    "stall check": """--stall-check --no-stall-check --stall-check-warning-time-seconds
        --stall-check-shutdown-time-seconds""",
    "library": """--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
        --num-nccl-streams --thread-affinity --gloo-timeout-seconds""",
    "logging": """--log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
        --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp""",
    "hosts": "-H --hosts -hostfile --hostfile --host-discovery-script",
    "controller": "--gloo --mpi --jsrun",
}
# Which mean something else here.
OTHERWISE = {
    "-v": "says what is started and how, as `--verbose`; the version is `ringlet --version`",
    "--version": "`ringlet --version`",
}
