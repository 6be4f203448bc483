//! Containers without a registry: root file systems made by debootstrap, started by a Docker engine that is here.

use mpsshim_tests::artifacts::target;
use mpsshim_tests::control_daemon::Done;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

/// Debian releases for containers: glibc 2.31, as Ubuntu 20.04 has; where mirrors have it no more, 2.36.
const SUITES: [&str; 2] = ["bullseye", "bookworm"];

/// Why there are no containers; `None`: there are.
static MISSING: LazyLock<Option<String>> = LazyLock::new(|| {
    let asked = Command::new("docker").arg("info").output();
    match asked.map(Done::from) {
        Err(error) => Some(format!("docker: {error}")),
        Ok(done) if done.code != 0 => Some(done.err.lines().last().unwrap_or_default().to_owned()),
        Ok(_) => debootstrap_missing(),
    }
});

fn debootstrap_missing() -> Option<String> {
    let found = Command::new("debootstrap").arg("--version").output();
    let root = nix::unistd::geteuid().is_root();
    match found {
        Err(error) => Some(format!("debootstrap: {error}")),
        Ok(_) if !root => Some("debootstrap needs root".to_owned()),
        Ok(_) => None,
    }
}

/// Whether packages can be built; says why not.
pub fn packages() -> bool {
    let folders = fs::read_dir(target()).into_iter().flatten().flatten();
    let installed = folders
        .map(|entry| entry.file_name())
        .any(|name| name.to_string_lossy().starts_with("zig-"));
    let found = installed || Command::new("cargo-zigbuild").arg("-V").output().is_ok();
    if !found {
        eprintln!("no package is tested: scripts/package.sh installs cargo-zigbuild");
    }
    found
}

/// Whether containers can be tested; says why not.
pub fn containers() -> bool {
    if !packages() {
        return false;
    }
    if let Some(why) = &*MISSING {
        eprintln!("no container is tested: {why}");
        return false;
    }
    // Neither needs the other.
    let base = thread::scope(|scope| {
        let base = scope.spawn(|| BASE.is_some());
        LazyLock::force(&PACKAGES);
        base.join().expect("no panic")
    });
    if !base {
        eprintln!("no container is tested: debootstrap makes none of {SUITES:?} here");
    }
    base
}

/// Does a command that must succeed; gives what it printed.
#[track_caller]
pub fn done(command: &mut Command) -> String {
    let result = Done::from(command.output().expect("run"));
    assert_eq!(result.code, 0, "{command:?}: {}{}", result.out, result.err);
    result.out
}

/// Unpacks the archive into a folder; where it is then.
pub fn unpack(folder: &Path) -> PathBuf {
    done(
        Command::new("tar")
            .arg("-xzf")
            .arg(&PACKAGES.archive)
            .arg("-C")
            .arg(folder),
    );
    let entries = fs::read_dir(folder).expect("list");
    let mut paths = entries.map(|entry| entry.expect("entry").path());
    let installed = paths.find(|path| path.join("bin").is_dir());
    installed.expect("unpacked")
}

pub fn docker(arguments: &[&str]) -> Command {
    let mut command = Command::new("docker");
    // An engine without BuildKit's plugin builds by itself.
    command.args(arguments).env("DOCKER_BUILDKIT", "0");
    command
}

static BASE: LazyLock<Option<String>> = LazyLock::new(|| {
    let made = target().join("containers");
    fs::create_dir_all(&made).expect("directory");
    let suite = SUITES.iter().find(|suite| {
        let image = docker(&["image", "inspect", &name_of(suite)]).output();
        image.expect("docker").status.success() || bootstrap(suite, &made)
    });
    suite.map(|suite| name_of(suite))
});

/// An image with a minimal Debian, where there are [`containers`].
pub fn base_image() -> &'static str {
    BASE.as_deref().expect("there are containers")
}

fn name_of(suite: &str) -> String {
    format!("mpsshim-test-base:{suite}-systemd")
}

/// Makes the image of a release, from what an earlier run has kept where there is that; `false`: the mirror has the
/// release no more, or cannot be reached.
fn bootstrap(suite: &str, folder: &Path) -> bool {
    let root = folder.join(suite);
    let kept = folder.join(format!("{suite}-systemd.tar"));
    if kept.exists() || pack(suite, &root, &kept) {
        done(docker(&["import"]).arg(&kept).arg(name_of(suite)));
        return true;
    }
    false
}

/// Writes the file system of a release into an archive.
fn pack(suite: &str, root: &Path, archive: &Path) -> bool {
    // What was begun and not ended cannot be gone on with.
    let _ = fs::remove_dir_all(root);
    let made = Command::new("debootstrap")
        // Processes of containers come from this only where one is booted.
        .args(["--variant=minbase", "--include=systemd,systemd-sysv", suite])
        .arg(root)
        .output();
    if !made.expect("debootstrap").status.success() {
        return false;
    }
    let begun = archive.with_extension("begun");
    let left_out = [
        "var/cache/apt",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/locale",
    ];
    done(
        Command::new("tar")
            .arg("-C")
            .arg(root)
            .args(left_out.map(|path| format!("--exclude=./{path}")))
            .arg("-cf")
            .args([begun.as_os_str(), ".".as_ref()]),
    );
    fs::rename(begun, archive).expect("rename");
    fs::remove_dir_all(root).expect("remove");
    true
}

/// The packages, and softgpu and the examples for the same machines.
pub struct Packages {
    pub archive: PathBuf,
    pub debian: PathBuf,
    /// Where the programs lie that are in no package.
    pub built: PathBuf,
}

/// Built by `scripts/package.sh`.
pub static PACKAGES: LazyLock<Packages> = LazyLock::new(|| {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/package.sh");
    let made = done(
        Command::new(script)
            .args(["-p", "softgpu", "-p", "mpsshim-examples"])
            .env("CARGO_TARGET_DIR", target())
            .env_remove("LD_PRELOAD"),
    );
    let made = |ending: &str| {
        let found = made.lines().find(|path| path.ends_with(ending));
        PathBuf::from(found.expect(ending))
    };
    Packages {
        archive: made(".tar.gz"),
        debian: made("_amd64.deb"),
        built: target().join("x86_64-unknown-linux-gnu/release"),
    }
});

/// A container that lives as long as the value.
pub struct Container(String);

impl Container {
    /// Starts one that does nothing by itself. `/packages` has the packages, `/built` what was built with them.
    pub fn start(options: &[&str]) -> Container {
        let options: Vec<&str> = options.iter().copied().chain(["--init"]).collect();
        Container::run(&options, &["sleep", "600"])
    }

    /// Starts one whose first process is systemd; `None`, with a message: this machine lets none run.
    pub fn boot() -> Option<Container> {
        let options = [
            "--tty --cap-add SYS_ADMIN --security-opt seccomp=unconfined --tmpfs /run --env container=docker",
            "--cgroupns host --volume /sys/fs/cgroup:/sys/fs/cgroup",
        ];
        let options: Vec<&str> = options.iter().flat_map(|some| some.split(' ')).collect();
        let container = Container::run(&options, &["/sbin/init"]);
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            let state = container.shell("systemctl is-system-running || true");
            if ["running", "degraded"].contains(&state.out.trim()) {
                return Some(container);
            }
            if state.err.contains("is not running") || Instant::now() > patience {
                let told = docker(&["logs", &container.0]).output().expect("docker");
                let told = Done::from(told).out;
                let last = told.lines().map(str::trim).rfind(|line| !line.is_empty());
                eprintln!(
                    "systemd is not tested: {}",
                    last.unwrap_or(state.err.trim())
                );
                return None;
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    fn run(options: &[&str], program: &[&str]) -> Container {
        let at = |path: &Path, place: &str| format!("{}:{place}:ro", path.display());
        let folder = PACKAGES.archive.parent().expect("a folder");
        let mut command = docker(&["run", "--detach", "--network", "none"]);
        command
            .args(["--volume", &at(folder, "/packages")])
            .args(["--volume", &at(&PACKAGES.built, "/built")])
            .args(options)
            .arg(base_image())
            .args(program);
        Container(done(&mut command).trim().to_owned())
    }

    /// What a shell in it does with a script, which fails at the first command that does.
    pub fn shell(&self, script: &str) -> Done {
        let mut command = docker(&["exec", &self.0, "sh", "-ec", script]);
        command.output().expect("docker").into()
    }

    /// The same, which must succeed and print nothing on standard error; gives what it printed.
    #[track_caller]
    pub fn does(&self, script: &str) -> String {
        let result = self.shell(script);
        assert_eq!(
            (result.code, result.err.as_str()),
            (0, ""),
            "{script}: {}",
            result.out
        );
        result.out
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        remove(&["rm", "--force", "--volumes", &self.0]);
    }
}

/// Removes what may be gone already.
pub fn remove(arguments: &[&str]) {
    let _ = docker(arguments).output();
}
