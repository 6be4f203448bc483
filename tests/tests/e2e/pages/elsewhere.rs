//! Commands that are not run as they stand: who runs them instead, or why nobody does.

use Way::*;

/// Why a command, or a block that is no command, is not run here.
#[derive(Clone, Copy)]
pub enum Way {
    /// This test in `tests/tests` runs it: `PROGRAM/FILE.rs::FUNCTION`.
    Test(&'static str),
    /// This file of the project has all of its lines.
    Lines(&'static str),
    /// This other document has the same command.
    Page(&'static str),
    /// No command: what it is.
    Text(&'static str),
    /// What it needs.
    Needs(&'static str),
    /// Run here, with this after it.
    Then(&'static str),
    /// Run here, as this.
    As(&'static str),
}

const ADMINISTRATOR: Way = Needs("a GPU whose compute mode may be changed");
const CLUSTER: Way = Needs("a Kubernetes cluster");
const SYSTEMD: Way = Needs("a machine that systemd runs");
const GPU: Way = Needs("a GPU");
const COMPOSE: Way = Test("deploy/containers.rs::compose_has_three_programs_share_a_daemon");
const DOCKER: Way = Test("deploy/containers.rs::docker_alone");
const CONTAINERS: Way =
    Test("deploy/containers.rs::an_untouched_image_is_given_library_and_sockets");
const ARCHIVE: Way = Test("deploy/packaging.rs::the_archive_works_wherever_it_is_unpacked");
const DEBIAN: Way = Test("deploy/packaging.rs::the_debian_package_installs_upgrades_and_goes");
const MPI: Way = Test("deploy/mpi.rs::documented_commands_work");
const WEIGHTS: Way = Test(
    "e2e/users_apart.rs::work_of_a_user_with_a_small_weight_is_held_back_while_another_has_work",
);
const TOP: Way = Test("e2e/top.rs::the_screen_and_its_keys");
const SLURM: Way = Test("deploy/slurm.rs::steps_have_the_percentages_that_slurm_gives_them");

pub type Row = (&'static str, &'static str, Way);

/// Document; a command, the first line of a block and its end for the whole block, or `## ` and a section for what is
/// left in its blocks, or a line below it for what begins so there; what becomes of it.
pub const ELSEWHERE: &[Row] = &[
    (
        "docs/upgrade.md",
        "install -D mpsshim-0.1.0/bin/mps-server /usr/lib/mpsshim/earlier/0.1.0/mps-server",
        Test(
            "e2e/releases.rs::a_client_of_another_release_gets_a_server_that_the_package_has_left",
        ),
    ),
    (
        "docs/interface-v3.md",
        "## A file of servers",
        Test("e2e/server_file.rs::a_file_is_applied_to_a_running_daemon"),
    ),
    (
        "docs/interface-v3.md",
        "mps-control -p 3 server create train\n",
        Test("e2e/named_servers.rs::several_servers_have_clients_devices_and_limits_of_their_own"),
    ),
    (
        "docs/interface-v3.md",
        "mps-control -d -S\n",
        Test("e2e/named_partitions.rs::clients_get_partitions_of_their_own_server_only"),
    ),
    (
        "docs/operations.md",
        "$ mps-control suspend_client 4711 4822\n",
        Test(
            "e2e/suspend.rs::a_suspended_client_gives_its_memory_to_others_and_finds_it_as_it_was",
        ),
    ),
    (
        "docs/operations.md",
        "sm_partition add UUID CHUNKS",
        Test("e2e/partitions.rs::partitions_are_made_listed_and_removed"),
    ),
    (
        "docs/operations.md",
        "sm_partition rm UUID PARTITION",
        Test("e2e/partitions.rs::partitions_are_made_listed_and_removed"),
    ),
    (
        "docs/operations.md",
        "set_user_weight UID WEIGHT|none",
        WEIGHTS,
    ),
    (
        "docs/limits.md",
        "echo \"set_user_weight 1000 300\" | mps-control",
        WEIGHTS,
    ),
    (
        "docs/limits.md",
        "echo \"set_user_weight 1000 none\" | mps-control",
        WEIGHTS,
    ),
    (
        "docs/operations.md",
        "lspart",
        Test("e2e/partitions.rs::partitions_are_made_listed_and_removed"),
    ),
    (
        "docs/operations.md",
        "$ mps-control -d -S\n",
        Test("e2e/partitions.rs::clients_run_in_their_partitions_and_the_others_beside_them"),
    ),
    (
        "docs/limits.md",
        "mps-control -d -S\n",
        Test("e2e/partitions.rs::clients_run_in_their_partitions_and_the_others_beside_them"),
    ),
    (
        "docs/operations.md",
        "nvidia-smi -c EXCLUSIVE_PROCESS",
        ADMINISTRATOR,
    ),
    ("docs/operations.md", "nvidia-smi -c DEFAULT", ADMINISTRATOR),
    (
        "docs/containers.md",
        "docker compose run --rm exclusive-process",
        ADMINISTRATOR,
    ),
    (
        "README.md",
        "mpirun -np 4 mps-run ./heat",
        Page("docs/mpi.md"),
    ),
    ("README.md", "scripts/demo.sh", Lines(".ci/run")),
    ("README.md", "scripts/test.sh", Lines(".ci/run")),
    (
        "README.md",
        "cargo build --release && install -Dt ~/.local/bin target/release/mps-control target/release/mps-server target/release/mps-run target/release/libmpsshim.so",
        Needs("a release build, and a home directory to write in"),
    ),
    (
        "README.md",
        "tar -xzf mpsshim-0.2.0-x86_64-linux.tar.gz -C /opt",
        ARCHIVE,
    ),
    ("README.md", "mps-control top", TOP),
    (
        "README.md",
        "scripts/package.sh",
        Lines("scripts/images.sh"),
    ),
    ("README.md", "apt install ./mpsshim_0.2.0_amd64.deb", DEBIAN),
    (
        "docs/install.md",
        "scripts/package.sh",
        Lines("scripts/images.sh"),
    ),
    (
        "docs/install.md",
        "apt install ./mpsshim_0.2.0_amd64.deb",
        DEBIAN,
    ),
    ("docs/install.md", "apt purge", DEBIAN),
    (
        "docs/install.md",
        "systemctl disable --now mpsshim",
        SYSTEMD,
    ),
    (
        "docs/install.md",
        "export LD_PRELOAD=/usr/lib/mpsshim/libmpsshim.so",
        Then("./nbody -benchmark"),
    ),
    (
        "docs/install.md",
        "tar -xzf mpsshim-0.2.0-x86_64-linux.tar.gz -C /opt",
        ARCHIVE,
    ),
    (
        "docs/install.md",
        "/opt/mpsshim-0.2.0-x86_64-linux/bin/mps-run ./nbody -benchmark",
        ARCHIVE,
    ),
    (
        "docs/operations.md",
        "/var/log/mpsshim/*.log {\n",
        Lines("packaging/logrotate/mpsshim"),
    ),
    (
        "docs/operations.md",
        "Command of process 4711 of user 1000 refused: quit is reserved for root and the user who runs the daemon\n",
        Test("e2e/users.rs::every_refusal_names_user_and_process"),
    ),
    (
        "docs/operations.md",
        "Server 526 of user 1000 taken over with 3 clients\n",
        Test("e2e/take_over.rs::a_server_and_its_clients_are_the_next_daemon_s"),
    ),
    (
        "docs/operations.md",
        "[2026-11-20 09:09:36.566 Control  1105] NEW CLIENT 1108 from user 0: Server is not ready, push client to pending list\n",
        Test("e2e/control.rs::every_log_line_has_its_stamp"),
    ),
    ("docs/operations.md", "top", TOP),
    (
        "docs/operations.md",
        "mps-control -f",
        Test("deploy/service.rs::a_supervisor_is_told"),
    ),
    ("docs/operations.md", "systemctl reload", SYSTEMD),
    ("docs/operations.md", "systemctl stop", SYSTEMD),
    (
        "docs/operations.md",
        "mps-control COMMAND ARGS",
        Text("what a command looks like"),
    ),
    (
        "docs/operations.md",
        "quit now",
        Test("e2e/control.rs::unknown_commands"),
    ),
    (
        "docs/operations.md",
        "tests/gpu/transcript.py --build target/release --client target/release/client work",
        GPU,
    ),
    (
        "docs/containers.md",
        "scripts/images.sh",
        Lines("tests/tests/deploy/containers.rs"),
    ),
    ("docs/containers.md", "## Compose", COMPOSE),
    ("docs/containers.md", "## Docker alone", DOCKER),
    ("docs/containers.md", "docker stop", DOCKER),
    ("docs/containers.md", "docker logs", DOCKER),
    ("docs/containers.md", "docker logs mpsshim", DOCKER),
    (
        "docs/containers.md",
        "## One line in an image",
        Test("deploy/containers.rs::the_documented_line_is_the_dockerfile_s"),
    ),
    (
        "docs/containers.md",
        "## Without touching the image",
        CONTAINERS,
    ),
    (
        "docs/containers.md",
        "docker run --user",
        Test("deploy/containers.rs::namespaces_users_and_roots_differ"),
    ),
    (
        "docs/containers.md",
        "docker volume create --opt type=tmpfs --opt device=tmpfs --opt o=uid=1000,mode=755",
        Test("deploy/containers.rs::who_is_not_served_is_told_why"),
    ),
    (
        "docs/kubernetes.md",
        "kubectl apply -k packaging/kubernetes",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "kubectl -n mpsshim rollout status daemonset/mpsshim",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "kubectl -n mpsshim exec daemonset/mpsshim -c daemon -- mps-control ps",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "kustomize edit set image mpsshim=REGISTRY/mpsshim:TAG",
        Needs("kustomize, which no test has"),
    ),
    (
        "docs/kubernetes.md",
        "kubectl apply -f packaging/kubernetes/nbody-share.yaml",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "resources:\n",
        Lines("packaging/kubernetes/nbody-share.yaml"),
    ),
    (
        "docs/kubernetes.md",
        "kubectl apply -f packaging/kubernetes/nbody.yaml",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "kubectl -n mpsshim logs daemonset/mpsshim -c device-plugin",
        CLUSTER,
    ),
    (
        "docs/kubernetes.md",
        "kubectl -n mpsshim logs daemonset/mpsshim -c daemon",
        CLUSTER,
    ),
    (
        "docs/support.md",
        "tests/gpu/conformance.py --program target/release/conformance --build target/release",
        GPU,
    ),
    (
        "docs/support.md",
        "tests/gpu/frameworks.py --build target/release",
        GPU,
    ),
    (
        "docs/upgrade.md",
        "apt install ./mpsshim_0.2.0_amd64.deb",
        DEBIAN,
    ),
    ("docs/upgrade.md", "systemctl restart", SYSTEMD),
    ("docs/upgrade.md", "systemctl restart mpsshim", SYSTEMD),
    (
        "docs/upgrade.md",
        "systemctl kill --kill-who=main --signal=KILL mpsshim",
        SYSTEMD,
    ),
    (
        "docs/recipes.md",
        "mpirun -np 4 mps-run ./heat",
        Page("docs/mpi.md"),
    ),
    (
        "docs/recipes.md",
        "srun --gres=mps:25 nbody -compare",
        Page("docs/slurm.md"),
    ),
    ("docs/recipes.md", "mps-control top", TOP),
    (
        "docs/recipes.md",
        "mps-control -d -M --metrics 127.0.0.1:9400",
        Test("e2e/users.rs::one_server_for_all_users_at_once"),
    ),
    ("docs/slurm.md", "## Configuration", SLURM),
    ("docs/slurm.md", "## Use", SLURM),
    (
        "docs/faults.md",
        "Server 4711: client 4822 of user 1000 alone had work in flight and has caused the fault; program: /usr/bin/python3.11 /home/ada/train.py; kernel: scatter\n",
        Text("a line of control.log"),
    ),
    (
        "docs/faults.md",
        "$ mps-control quarantine list\n",
        Test("e2e/quarantine.rs::an_operator_adds_and_releases_programs"),
    ),
    ("docs/monitoring.md", "mps-control top", TOP),
    (
        "docs/monitoring.md",
        "mps-control top --json --interval 5 | jq …",
        As("mps-control top --json --interval 0.2 | head -n 2 | python3 -m json.tool --json-lines"),
    ),
    (
        "docs/monitoring.md",
        "scrape_configs:\n",
        Text("lines of Prometheus' configuration"),
    ),
    (
        "docs/monitoring.md",
        "LD_PRELOAD=/usr/lib/mpsshim/libmpsshim.so nvitop",
        Test("e2e/nvml.rs::programs_in_python_see_clients_too"),
    ),
    ("docs/monitoring.md", "…", Text("whatever is to be traced")),
    ("docs/mpi.md", "## OpenMPI\nmpirun ", MPI),
    ("docs/mpi.md", "## MPICH\nmpirun ", MPI),
    ("docs/mpi.md", "## Which mode\nmpirun ", MPI),
    (
        "docs/compatibility.md",
        "tests/gpu/frameworks.py --build target/release",
        GPU,
    ),
    (
        "docs/compatibility.md",
        "tests/gpu/programs.py --programs DIR --build target/release",
        GPU,
    ),
    (
        "docs/faults.md",
        "cargo run --release -p mpsshim-server --example image_bonds -- PROGRAM",
        Text("it would build a release"),
    ),
    (
        "docs/settings.md",
        "UPDATE_DOCS=1 cargo test -p mpsshim-control settings",
        Text("it would rewrite the page"),
    ),
    (
        "docs/troubleshooting.md",
        "LD_DEBUG=libs ./program 2>&1 | grep mpsshim",
        As(
            "export LD_PRELOAD=/usr/lib/mpsshim/libmpsshim.so; LD_DEBUG=libs ./program 2>&1 | grep mpsshim",
        ),
    ),
    (
        "docs/troubleshooting.md",
        "mpirun -x LD_PRELOAD",
        Text("an option; docs/mpi.md has whole commands"),
    ),
    (
        "docs/troubleshooting.md",
        "mps-control doctor -p PID",
        As("mps-control doctor -p CLIENT_PID"),
    ),
    ("docs/troubleshooting.md", "mps-control top", TOP),
    (
        "examples/README.md",
        "mpirun -np 4 mps-run ./heat --verify",
        MPI,
    ),
    (
        "docs/mpi.md",
        "./heat --halo device",
        Test("deploy/mpi.rs::ranks_share_one_server_and_give_the_result_of_one"),
    ),
    (
        "docs/coverage.md",
        "UPDATE_DOCS=1 cargo test -p mpsshim-api --test coverage",
        Text("it would rewrite the page"),
    ),
    ("examples/mpi/README.md", "make", MPI),
    (
        "examples/mpi/README.md",
        "mpirun -np 4 mps-run ./heat --verify",
        MPI,
    ),
    (
        "examples/mpi/README.md",
        "./heat --help",
        Test("deploy/mpi.rs::the_example_refuses_what_makes_no_sense"),
    ),
    (
        "examples/mpi/README.md",
        "apt-get install libopenmpi-dev",
        Needs("a registry of packages"),
    ),
];
