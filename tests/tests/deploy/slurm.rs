//! Jobs with gres/mps on a Slurm cluster of one node, configured with the lines of docs/slurm.md.

use mpsshim_tests::artifacts::{artifact, driver, write_program};
use mpsshim_tests::control_daemon::{Done, other_user, wait_until};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NBODY: &str = "-compare -numbodies=512";
const CORRECT: &str = "  OK (";

/// The daemons of a cluster in a directory of their own; they end with the value.
struct Cluster {
    folder: TempDir,
    daemons: Vec<Child>,
}

/// The cluster of a test, while no other has one: Slurm knows a node by the machine's name.
fn cluster() -> Option<(Cluster, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    // What failed elsewhere has ended its own cluster.
    let turn = TURN.lock().unwrap_or_else(|failed| failed.into_inner());
    let cluster = match other_user() {
        Some(_) => Cluster::start(),
        None => Err("slurmd needs root".to_owned()),
    };
    match cluster {
        Ok(cluster) => Some((cluster, turn)),
        Err(why) => {
            eprintln!("Slurm is not tested: {why}");
            None
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The indented lines of docs/slurm.md.
fn documented() -> Vec<String> {
    let text = fs::read_to_string(root().join("docs/slurm.md")).expect("docs/slurm.md");
    let lines = text.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(str::to_owned).collect()
}

fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("address").port()
}

impl Cluster {
    /// `Err`: what this machine lacks.
    fn start() -> Result<Cluster, String> {
        static MISSING: LazyLock<Option<String>> = LazyLock::new(|| {
            ["munged", "slurmctld", "slurmd", "srun"]
                .iter()
                .find_map(|name| {
                    let asked = Command::new(name).arg("-V").output();
                    asked.err().map(|error| format!("{name}: {error}"))
                })
        });
        if let Some(why) = &*MISSING {
            return Err(why.clone());
        }
        let folder = TempDir::with_prefix("slurm-").expect("directory");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("mode");
        let mut cluster = Cluster {
            folder,
            daemons: Vec::new(),
        };
        cluster.configure();
        cluster.run("munged", &cluster.munge_options())?;
        cluster.run("slurmctld", &["-D".to_owned(), "-i".to_owned()])?;
        cluster.run("slurmd", &["-D".to_owned()])?;
        let until = Instant::now() + Duration::from_secs(30);
        while cluster.command("sinfo", &["-h", "-o", "%t"]).out.trim() != "idle" {
            if let Some(why) = cluster.lost() {
                return Err(why);
            }
            assert!(Instant::now() < until, "the node does not come up");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(cluster)
    }

    fn path(&self, name: &str) -> String {
        let path = self.folder.path().join(name);
        path.to_str().expect("text").to_owned()
    }

    fn munge_options(&self) -> Vec<String> {
        let mut options = vec!["--foreground".to_owned(), "--force".to_owned()];
        for name in ["key-file", "socket", "pid-file", "log-file", "seed-file"] {
            options.push(format!("--{name}={}", self.path(&format!("munge.{name}"))));
        }
        options
    }

    /// The scripts and the documented lines, with the paths of this place, and what any cluster needs besides.
    fn configure(&self) {
        let config = self.path("config.toml");
        let library = driver();
        fs::write(
            &config,
            format!("cuda_library = \"{}\"\n", library.display()),
        )
        .expect("write");
        let control = artifact("mps-control");
        // Started by the daemon; not built with the test by cargo.
        artifact("mps-server");
        for name in ["prolog", "epilog", "task-prolog"] {
            let text = fs::read_to_string(root().join("packaging/slurm").join(name)).expect(name);
            let library = artifact("libmpsshim.so");
            let text = text
                .replace("/run/mpsshim", &self.path("run"))
                .replace(
                    "/usr/lib/mpsshim/libmpsshim.so",
                    library.to_str().expect("text"),
                )
                .replace(
                    "/usr/bin/mps-control",
                    &format!("{} --config {config}", control.display()),
                );
            write_program(Path::new(&self.path(name)), &text);
        }
        // A device, as Slurm insists, that is none of NVIDIA's.
        let made = Command::new("mknod")
            .args([&self.path("nvidia0"), "c", "1", "3"])
            .status();
        assert!(made.expect("mknod").success());
        fs::write(self.path("munge.key-file"), [7; 1024]).expect("write");
        let secret = fs::Permissions::from_mode(0o400);
        fs::set_permissions(self.path("munge.key-file"), secret).expect("mode");

        let name = nix::sys::utsname::uname().expect("name");
        let node = name.nodename().to_str().expect("text");
        let node = node.split('.').next().expect("a name");
        let (mut slurm, mut gres) = (String::new(), String::new());
        for line in documented() {
            let to = if line.starts_with("Name=") {
                &mut gres
            } else if line.contains('=') && !line.contains(' ') {
                &mut slurm
            } else {
                continue;
            };
            let line = line.replace("/usr/share/mpsshim/slurm", &self.path(""));
            *to += &(line.replace("/dev/nvidia0", &self.path("nvidia0")) + "\n");
        }
        assert_eq!((slurm.lines().count(), gres.lines().count()), (6, 2));
        slurm += &format!(
            "ClusterName=test\nSlurmctldHost={node}(127.0.0.1)\nSlurmctldPort={}\nSlurmdPort={}\nSlurmUser=root\n\
             AuthInfo=socket={}\nStateSaveLocation={}\nSlurmdSpoolDir={}\nSlurmctldPidFile={}\nSlurmdPidFile={}\n\
             ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n\
             SelectTypeParameters=CR_Core\nNodeName={node} NodeAddr=127.0.0.1 CPUs={} Gres=gpu:1,mps:100\n\
             PartitionName=main Nodes={node} Default=YES OverSubscribe=FORCE:4 State=UP\n",
            free_port(),
            free_port(),
            self.path("munge.socket"),
            self.path("state"),
            self.path("spool"),
            self.path("slurmctld.pid"),
            self.path("slurmd.pid"),
            std::thread::available_parallelism().expect("processors"),
        );
        for folder in ["state", "spool", "run"] {
            fs::create_dir(self.path(folder)).expect("directory");
        }
        fs::write(self.path("slurm.conf"), slurm).expect("write");
        fs::write(self.path("gres.conf"), gres).expect("write");
        fs::write(self.path("cgroup.conf"), "CgroupAutomount=no\n").expect("write");
    }

    fn run(&mut self, name: &str, options: &[String]) -> Result<(), String> {
        let log = fs::File::create(self.path(&format!("{name}.out"))).expect("log");
        let started = Command::new(name)
            .args(options)
            .env("SLURM_CONF", self.path("slurm.conf"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("log"))
            .stderr(log)
            .spawn();
        let started = started.map_err(|error| format!("{name}: {error}"))?;
        self.daemons.push(started);
        if name == "munged" {
            wait_until("munged listens", || {
                Path::new(&self.path("munge.socket")).exists()
            });
        }
        Ok(())
    }

    /// A daemon that has ended, and its last line: what it missed.
    fn lost(&mut self) -> Option<String> {
        let names = ["munged", "slurmctld", "slurmd"];
        let states = self.daemons.iter_mut().map(|daemon| daemon.try_wait());
        let ended = states
            .zip(names)
            .find(|(state, _)| !matches!(state, Ok(None)))?;
        let log = fs::read_to_string(self.path(&format!("{}.out", ended.1))).unwrap_or_default();
        Some(format!(
            "{}: {}",
            ended.1,
            log.lines().last().unwrap_or_default()
        ))
    }

    fn prepare(&self, program: &str, arguments: &[&str]) -> Command {
        let nbody = artifact("nbody");
        let path = std::env::var("PATH").expect("a path");
        let programs = nbody.parent().expect("a folder").display();
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir("/")
            .env("SLURM_CONF", self.path("slurm.conf"))
            .env("PATH", format!("{programs}:{path}"))
            .env("MPSSHIM_CUDA_LIBRARY", driver());
        for name in [
            "LD_PRELOAD",
            "MPSSHIM_PIPE_DIRECTORY",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        ] {
            command.env_remove(name);
        }
        command
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Done {
        let mut command = self.prepare(program, arguments);
        command.output().expect("run").into()
    }

    /// The daemon of a user, if there is one.
    fn daemon(&self, user: u32) -> Option<String> {
        let file = self.path(&format!("run/{user}/mps-control.pid"));
        fs::read_to_string(file).ok()
    }

    fn log(&self, user: u32) -> String {
        let file = self.path(&format!("run/{user}/logs/control.log"));
        // The daemon writes its process id before its log exists.
        fs::read_to_string(file).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Jobs of a test that failed, whose epilogs end what they have started.
        let jobs = self.command("squeue", &["-h", "-o", "%A"]).out;
        for job in jobs.lines() {
            self.command("scancel", &[job]);
        }
        let until = Instant::now() + Duration::from_secs(5);
        while !jobs.is_empty()
            && Instant::now() < until
            && !self.command("squeue", &["-h"]).out.is_empty()
        {
            std::thread::sleep(Duration::from_millis(100));
        }
        for daemon in self.daemons.iter_mut().rev() {
            // It may have ended.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A job that runs nbody and then goes on until it is let go.
struct Job(Child);

impl Job {
    fn start(cluster: &Cluster, user: u32, percentage: u32) -> Job {
        let gres = format!("--gres=mps:{percentage}");
        let uid = format!("--uid={user}");
        let gid = format!("--gid={user}");
        let script = format!("nbody {NBODY} && echo done && cat");
        let mut srun = cluster.prepare("srun", &[&gres, &uid, &gid, "sh", "-c", &script]);
        let pipes = srun.stdin(Stdio::piped()).stdout(Stdio::piped());
        Job(pipes.spawn().expect("srun"))
    }

    #[track_caller]
    fn end(mut self) {
        drop(self.0.stdin.take());
        let done = Done::from(self.0.wait_with_output().expect("wait"));
        assert_eq!(done.code, 0, "{}{}", done.out, done.err);
        assert!(done.out.contains(CORRECT), "{}", done.out);
    }
}

#[test]
fn jobs_of_a_user_share_a_daemon_that_ends_with_the_last() {
    let Some((cluster, _turn)) = cluster() else {
        return;
    };
    let user = other_user().expect("root");
    let first = Job::start(&cluster, user, 25);
    let clients = |count| {
        wait_until("the clients have come", || {
            cluster.daemon(user).is_some()
                && cluster.log(user).matches("NEW CLIENT").count() == count
        });
    };
    clients(1);
    let daemon = cluster.daemon(user).expect("listens");
    // It is the user's.
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.trim())).expect("process");
    assert!(
        status.contains(&format!("Uid:\t{user}\t{user}\t")),
        "{status}"
    );
    let second = Job::start(&cluster, user, 50);
    clients(2);
    assert_eq!(cluster.daemon(user), Some(daemon.clone()));
    assert_eq!(cluster.log(user).matches("Starting new server").count(), 1);
    first.end();
    wait_until("the first job is struck out", || {
        let jobs = fs::read_dir(cluster.path(&format!("run/{user}.jobs")));
        jobs.is_ok_and(|jobs| jobs.count() == 1)
    });
    assert_eq!(cluster.daemon(user), Some(daemon.clone()));
    second.end();
    wait_until("the daemon has gone", || {
        cluster.daemon(user).is_none() && !Path::new(&format!("/proc/{}", daemon.trim())).exists()
    });
    // The next job has another.
    let third = Job::start(&cluster, user, 100);
    clients(3);
    third.end();
    wait_until("the daemon has gone", || cluster.daemon(user).is_none());
}

#[test]
fn steps_have_the_percentages_that_slurm_gives_them() {
    let Some((cluster, _turn)) = cluster() else {
        return;
    };
    let control = artifact("mps-control").display().to_string();
    // While it runs, a client says what it may have; a client that waits for its server has no percentage yet, and none is
    // listed between the two.
    let ask = format!(
        "nbody -benchmark -numbodies=1024 -i=1000000 >/dev/null & \
         until table=$({control} --format csv ps | grep -v ,waiting,) && [ \"$(echo \"$table\" | wc -l)\" -gt 1 ]; \
         do sleep 0.05; done; echo \"$table\"; kill $!"
    );
    let percentages = |table: &str| -> Vec<String> {
        let mut rows = table
            .lines()
            .map(|line| line.split(',').collect::<Vec<_>>());
        let header = rows.next().expect("a header");
        let at = header
            .iter()
            .position(|name| *name == "active_thread_percentage");
        let at = at.expect("a column");
        rows.map(|row| row[at].to_owned()).collect()
    };
    for (words, expected) in [
        (vec!["salloc", "--gres=mps:50", "srun"], "50"),
        (
            vec!["salloc", "--gres=mps:50", "srun", "--gres=mps:25"],
            "25",
        ),
    ] {
        let done = cluster.command(words[0], &[&words[1..], &["sh", "-c", &ask]].concat());
        let found = percentages(&done.out);
        assert_eq!(found.len(), 1, "{}{}", done.out, done.err);
        assert_eq!(found[0].trim_end_matches(".0"), expected, "{}", done.out);
    }
    for line in documented() {
        if !line.contains("nbody") {
            continue;
        }
        let done = cluster.command("sh", &["-c", &line.replace("-compare", NBODY)]);
        assert_eq!(done.code, 0, "{line}: {}", done.err);
        assert!(done.out.contains(CORRECT), "{line}: {}", done.out);
    }
}

#[test]
fn a_job_without_mps_is_left_alone() {
    let Some((cluster, _turn)) = cluster() else {
        return;
    };
    let done = cluster.command(
        "srun",
        &["sh", "-c", "echo \"$LD_PRELOAD$MPSSHIM_PIPE_DIRECTORY\""],
    );
    assert_eq!((done.code, done.out.as_str()), (0, "\n"), "{}", done.err);
    assert_eq!(fs::read_dir(cluster.path("run")).expect("list").count(), 0);
}
