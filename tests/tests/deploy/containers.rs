//! Daemon and programs in containers of their own: the commands of docs/containers.md, and what separates containers.

use crate::docker::{PACKAGES, base_image, containers, docker, done, remove, unpack};
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, wait_until};
use mpsshim_tests::scene::daemon;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard};
use tempfile::TempDir;

const TAG: &str = "test";
/// Enough to see that it is right, and soon done by softgpu.
const NBODY: &str = "-compare -numbodies=512";
const CORRECT: &str = "  OK (";

/// The images, made of a base that has softgpu where NVIDIA's runtime would put the driver, and their names on this
/// machine; `None`: there are no containers.
fn images() -> Option<(&'static Images, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    static IMAGES: LazyLock<Images> = LazyLock::new(Images::build);
    // One test at a time: documented names are given once. A test that failed leaves the rest to go on.
    let turn = TURN.lock().unwrap_or_else(|failed| failed.into_inner());
    containers().then(|| (&*IMAGES, turn))
}

struct Images {
    base: String,
    /// The unpacked archive of the same release, for the host.
    installed: PathBuf,
    folder: TempDir,
}

impl Images {
    fn build() -> Images {
        let folder = TempDir::with_prefix("images-").expect("directory");
        let context = folder.path().join("base");
        fs::create_dir(&context).expect("directory");
        fs::copy(
            PACKAGES.built.join("libsoftgpu.so"),
            context.join("libcuda.so.1"),
        )
        .expect("copy");
        fs::copy(PACKAGES.built.join("nbody"), context.join("nbody")).expect("copy");
        let steps = format!(
            "FROM {}\nCOPY libcuda.so.1 /usr/lib/x86_64-linux-gnu/\nCOPY nbody /usr/bin/\nRUN ldconfig\n",
            base_image()
        );
        fs::write(context.join("Dockerfile"), steps).expect("write");
        let base = format!("mpsshim-test-base:{TAG}");
        done(docker(&["build", "--tag", &base]).arg(&context));
        done(
            Command::new(root().join("scripts/images.sh"))
                .args(["-p", "softgpu"])
                .env("CARGO_TARGET_DIR", mpsshim_tests::artifacts::target())
                .env("DOCKER_BUILDKIT", "0")
                .env("BASE", &base)
                .env("MPSSHIM_TAG", TAG),
        );
        Images {
            base,
            installed: unpack(folder.path()),
            folder,
        }
    }

    /// A program of the archive, in an environment without settings, whose sockets are in that directory.
    fn on_host(&self, program: &str, pipe: &Path) -> Command {
        let mut command = Command::new(self.installed.join("bin").join(program));
        command
            .env("MPSSHIM_PIPE_DIRECTORY", pipe)
            .env("MPSSHIM_LOG_DIRECTORY", pipe.join("logs"))
            .env("MPSSHIM_CUDA_LIBRARY", PACKAGES.built.join("libsoftgpu.so"));
        command
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The indented lines of a section of docs/containers.md.
fn documented(section: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("docs/containers.md")).expect("docs/containers.md");
    let begin = text.find(&format!("\n## {section}\n")).expect(section) + 4;
    let section = &text[begin..];
    let section = &section[..section.find("\n## ").unwrap_or(section.len())];
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(str::to_owned).collect()
}

/// What a shell prints on both of its outputs, and that it ended well.
#[track_caller]
fn shell(command: &mut Command, line: &str) -> String {
    let asked = command.args(["-c", &format!("{line} 2>&1")]);
    let result = Done::from(asked.output().expect("run"));
    assert_eq!(result.code, 0, "{line}: {}", result.out);
    result.out
}

/// Docker's options that give a container as much locked memory as there is, where this machine may.
fn may_lock(base: &str) -> bool {
    let tried = docker(&["run", "--rm", "--ulimit", "memlock=-1", base, "true"]).output();
    let may = tried.expect("docker").status.success();
    if !may {
        eprintln!("no right to raise the limit of locked memory: it stays as it is");
    }
    may
}

/// A daemon in a container with a volume of its own.
struct Daemon(String);

impl Daemon {
    /// Runs as that user.
    fn start(user: u32, options: &[&str]) -> Daemon {
        let name = format!("mpsshim-test-{}", std::process::id());
        let owner = format!("o=uid={user},mode=755");
        let tmpfs = ["type=tmpfs", "device=tmpfs", &owner];
        let mut create = docker(&["volume", "create"]);
        done(
            create
                .args(tmpfs.map(|option| format!("--opt={option}")))
                .arg(&name),
        );
        let volume = format!("{name}:/run/mpsshim");
        let mut command = docker(&["run", "--detach", "--init", "--name", &name]);
        let command = command
            .args(["--network", "none", "--volume", &volume])
            .args(["--user", &user.to_string()])
            .args(options)
            .arg(format!("mpsshim:{TAG}"));
        // From here on it is removed, whatever comes.
        let daemon = Daemon(name);
        done(command);
        wait_until("the daemon listens", || {
            daemon.control("get_server_list").code == 0
        });
        daemon
    }

    fn control(&self, command: &str) -> Done {
        let line = format!("mps-control {command}");
        let mut exec = docker(&["exec", &self.0, "sh", "-c", &line]);
        exec.output().expect("docker").into()
    }

    fn log(&self) -> String {
        done(&mut docker(&[
            "exec",
            &self.0,
            "cat",
            "/var/log/mpsshim/control.log",
        ]))
    }

    /// A client with the volume, which may not write in it.
    fn client(&self, options: &[&str], words: &[&str]) -> Done {
        let volume = format!("{}:/run/mpsshim:ro", self.0);
        let options = [&["--volume", &volume], options].concat();
        client(&options, words)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        remove(&["rm", "--force", "--volumes", &self.0]);
        remove(&["volume", "rm", "--force", &self.0]);
    }
}

fn client(options: &[&str], words: &[&str]) -> Done {
    let image = format!("mpsshim-nbody:{TAG}");
    let mut command = docker(&["run", "--rm", "--network", "none"]);
    let command = command.args(options).arg(image).args(words);
    command.output().expect("docker").into()
}

fn nbody() -> Vec<&'static str> {
    NBODY.split(' ').collect()
}

#[track_caller]
fn is_correct(result: &Done) {
    assert_eq!(result.code, 0, "{}{}", result.out, result.err);
    assert!(result.out.contains(CORRECT), "{}", result.out);
}

/// The compose file, with changes. What it has started ends with the value.
struct Project {
    compose: &'static str,
    files: String,
}

impl Project {
    fn shell(&self) -> Command {
        let mut shell = Command::new("sh");
        shell
            .current_dir(root().join("packaging/containers"))
            .env("COMPOSE_FILE", &self.files)
            .env("COMPOSE_PROJECT_NAME", "mpsshim-test");
        shell
    }

    /// A documented line as this machine's compose is called.
    fn line(&self, line: &str) -> String {
        line.replace("docker compose", self.compose)
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let down = self.line("docker compose down --volumes");
        // Mostly it has been done.
        let _ = self.shell().args(["-c", &down]).output();
    }
}

#[test]
fn compose_has_three_programs_share_a_daemon() {
    let Some((images, _turn)) = images() else {
        return;
    };
    let plugin = docker(&["compose", "version"]).output();
    let compose = if plugin.expect("docker").status.success() {
        "docker compose"
    } else if Command::new("docker-compose")
        .arg("version")
        .output()
        .is_ok()
    {
        "docker-compose"
    } else {
        return eprintln!("no docker compose: the compose file is not tested");
    };
    // What this machine lacks: a GPU, a registry, rights.
    let mut changes =
        format!("services:\n  mpsshim:\n    image: mpsshim:{TAG}\n    runtime: runc\n");
    if !may_lock(&images.base) {
        changes += "    ulimits:\n      memlock: 65536\n";
    }
    for program in 1..=3 {
        changes += &format!(
            "  nbody-{program}:\n    image: mpsshim-nbody:{TAG}\n    runtime: runc\n    command: {NBODY}\n"
        );
    }
    let file = images.folder.path().join("changes.yaml");
    fs::write(&file, changes).expect("write");
    let project = Project {
        compose,
        files: format!("compose.yaml:{}", file.display()),
    };
    let run = |line: &str| shell(&mut project.shell(), &project.line(line));
    let commands = documented("Compose");
    let [up, logs, percentage, down] = commands.as_slice() else {
        panic!("{commands:?}");
    };
    run(up);
    let printed = run(logs);
    let asked = run(percentage);
    let log = run("docker compose exec -T mpsshim cat /var/log/mpsshim/control.log");
    let server = run("docker compose exec -T mpsshim cat /var/log/mpsshim/server.log");
    run(down);
    assert_eq!(printed.matches(CORRECT).count(), 3, "{printed}");
    assert_eq!(asked, "33.0\n");
    assert_eq!(log.matches("NEW CLIENT").count(), 3, "{log}");
    assert_eq!(log.matches("Starting new server").count(), 1, "{log}");
    assert!(
        server.contains("Active Threads Percentage set to 33.0"),
        "{server}"
    );
}

#[test]
fn docker_alone() {
    let Some((images, _turn)) = images() else {
        return;
    };
    let may_lock = may_lock(&images.base);
    let name = format!("mpsshim-test-{}", std::process::id());
    let _ended = Daemon(name.clone());
    let commands = documented("Docker alone");
    assert_eq!(commands.len(), 4);
    let mut printed = String::new();
    for command in commands {
        let mut line = command
            .replace(" --gpus all", "")
            .replace(
                " mpsshim-nbody -compare",
                &format!(" mpsshim-nbody:{TAG} {NBODY}"),
            )
            .replace("volume mpsshim:", &format!("volume {name}:"))
            .replace("--name mpsshim", &format!("--name {name}"))
            .replace("exec mpsshim", &format!("exec {name}"))
            .replace("stop mpsshim", &format!("stop {name}"));
        if let Some(start) = line.strip_suffix(" mpsshim") {
            line = format!("{start} mpsshim:{TAG}");
        }
        if !may_lock {
            line = line.replace(" --ulimit memlock=-1", "");
        }
        printed += &shell(&mut Command::new("sh"), &line);
        if command.contains("--detach") {
            let socket = ["exec", &name, "test", "-S", "/run/mpsshim/control"];
            wait_until("the daemon listens", || {
                docker(&socket).output().expect("docker").status.success()
            });
        }
    }
    assert!(printed.contains(CORRECT), "{printed}");
    let log = Done::from(docker(&["logs", &name]).output().expect("docker"));
    assert!(log.err.ends_with("Exit with status 0\n"), "{}", log.err);
}

#[test]
fn namespaces_users_and_roots_differ() {
    let Some((_, _turn)) = images() else {
        return;
    };
    let read_only = ["--read-only", "--tmpfs", "/var/log/mpsshim"];
    let daemon = Daemon::start(0, &read_only);
    let alone = [
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
    ];
    is_correct(&daemon.client(&alone, &nbody()));
    is_correct(&daemon.client(
        &[&alone[..], &["--env", "MPSSHIM_MODE=direct"]].concat(),
        &nbody(),
    ));
    let before = daemon.log();
    assert_eq!(before.matches("from user 0").count(), 2, "{before}");

    // Another user, and the same in a user and PID namespace of its own, where it is root.
    is_correct(&daemon.client(&["--user", "1000:1000"], &nbody()));
    assert_eq!(daemon.log().matches("from user 1000").count(), 1);
    let unconfined = [
        "--user",
        "1000:1000",
        "--security-opt",
        "seccomp=unconfined",
    ];
    let unshare = [&unconfined[..], &["--entrypoint", "unshare"]].concat();
    let own = ["--user", "--map-root-user", "--pid", "--fork"];
    if daemon
        .client(&unshare, &[&own[..], &["true"]].concat())
        .code
        == 0
    {
        is_correct(&daemon.client(&unshare, &[&own[..], &["nbody"], &nbody()].concat()));
        assert_eq!(daemon.log().matches("from user 1000").count(), 2);
    } else {
        eprintln!("no user namespace in a container: not tested");
    }

    // Nobody can put another daemon in the place of this one.
    let shell = ["--entrypoint", "sh"];
    let moved = daemon.client(&shell, &["-c", "mv /run/mpsshim/control /run/mpsshim/gone"]);
    assert!(moved.err.contains("Read-only file system"), "{}", moved.err);
}

#[test]
fn who_is_not_served_is_told_why() {
    let Some((_, _turn)) = images() else {
        return;
    };
    let log = ["--env", "MPSSHIM_LOG=info"];
    let unserved = client(&log, &nbody());
    is_correct(&unserved);
    let said =
        "no daemon listens there: running on the genuine driver, unshared directory=/run/mpsshim";
    assert!(unserved.err.contains(said), "{}", unserved.err);
    let quiet = client(&[], &nbody());
    is_correct(&quiet);
    assert_eq!(quiet.err, "");

    let daemon = Daemon::start(1000, &[]);
    let served = daemon.client(&[&log[..], &["--user", "1000:1000"]].concat(), &nbody());
    is_correct(&served);
    assert!(served.err.contains(" connected session="), "{}", served.err);
    // The directory is another user's, who could have put anything there.
    let refused = daemon.client(&log, &nbody());
    is_correct(&refused);
    let why = "/run/mpsshim belongs to user 1000; it must belong to root or to user 0";
    assert!(refused.err.contains(why), "{}", refused.err);
}

#[test]
fn an_untouched_image_is_given_library_and_sockets() {
    let Some((images, _turn)) = images() else {
        return;
    };
    let place = TempDir::with_prefix("cdi-").expect("directory");
    let pipe = place.path().join("pipe");
    let control = |arguments: &[&str]| {
        let mut command = images.on_host("mps-control", &pipe);
        Done::from(command.args(arguments).output().expect("run"))
    };
    assert_eq!(control(&["-d"]).code, 0);
    let file = place.path().join("mpsshim.json");
    let command = documented("Without touching the image");
    let words: Vec<&str> = command[0].split(' ').skip(1).collect();
    let written = words[..3]
        .iter()
        .copied()
        .chain([file.to_str().expect("text")]);
    let result = control(&written.collect::<Vec<_>>());
    assert_eq!(
        (result.code, result.out.as_str(), result.err.as_str()),
        (0, "", "")
    );
    let text = fs::read_to_string(&file).expect("specification");
    assert_eq!(control(&["cdi", "generate"]).out, text);
    let spec: Value = serde_json::from_str(&text).expect("JSON");
    is_specification(&spec);

    // As an engine that knows the interface does it.
    let edits = &spec["devices"][0]["containerEdits"];
    let mut run = docker(&["run", "--rm", "--network", "none"]);
    for variable in edits["env"].as_array().expect("env") {
        run.args(["--env", variable.as_str().expect("text")]);
    }
    for mount in edits["mounts"].as_array().expect("mounts") {
        let [from, to] = ["hostPath", "containerPath"].map(|key| mount[key].as_str().expect(key));
        let how = mount["options"]
            .as_array()
            .expect("options")
            .contains(&"ro".into());
        run.args([
            "--volume",
            &format!("{from}:{to}{}", if how { ":ro" } else { "" }),
        ]);
    }
    let applied = run.arg(&images.base).arg("nbody").args(nbody()).output();
    is_correct(&applied.expect("docker").into());
    // By hand.
    let library = images.installed.join("lib/mpsshim");
    let line = command[1]
        .replace(" --gpus all", "")
        .replace("/run/mpsshim:/run", &format!("{}:/run", pipe.display()))
        .replace(
            "/usr/lib/mpsshim:/usr",
            &format!("{}:/usr", library.display()),
        )
        .replace(
            "IMAGE nbody -compare",
            &format!("{} nbody {NBODY}", images.base),
        );
    assert!(shell(&mut Command::new("sh"), &line).contains(CORRECT));
    let mut clients = 2;
    if let Some(folder) = cdi_folder() {
        let mut run = docker(&["run", "--rm", DEVICE[0], DEVICE[1], &images.base]);
        is_correct(&nbody_with_device(&mut run, &folder, &file));
        clients += 1;
    } else {
        eprintln!("this engine knows no CDI: what it would do was done by hand");
    }
    if let Some(podman) = Podman::with(&images.base) {
        let mut run = podman.run(&DEVICE);
        is_correct(&nbody_with_device(&mut run, Path::new(PODMAN_CDI), &file));
        clients += 1;
    }
    let log = fs::read_to_string(pipe.join("logs/control.log")).expect("log");
    assert_eq!(log.matches("NEW CLIENT").count(), clients, "{log}");
    assert_eq!(control(&["quit"]).code, 0);
}

/// An engine's options for the device.
const DEVICE: [&str; 2] = ["--device", "mpsshim.io/gpu=all"];

/// Runs nbody in the container of `run`, whose engine finds this specification in that folder.
fn nbody_with_device(run: &mut Command, folder: &Path, specification: &Path) -> Done {
    let installed = folder.join("mpsshim.json");
    fs::create_dir_all(folder).expect("directory");
    fs::copy(specification, &installed).expect("copy");
    let result = run.arg("nbody").args(nbody()).output();
    fs::remove_file(&installed).expect("remove");
    result.expect("an engine").into()
}

/// Where this engine looks for specifications, if it does and there is none of this kind.
fn cdi_folder() -> Option<PathBuf> {
    let asked = docker(&["info", "--format", "{{json .CDISpecDirs}}"]).output();
    let told = Done::from(asked.ok().filter(|asked| asked.status.success())?).out;
    let folders: Vec<PathBuf> = serde_json::from_str(&told).ok()?;
    let folder = folders.into_iter().find(|folder| folder.is_dir())?;
    (!folder.join("mpsshim.json").exists()).then_some(folder)
}

/// Podman with an image, where it can run that.
struct Podman {
    image: String,
}

/// Where Podman looks for specifications.
const PODMAN_CDI: &str = "/etc/cdi";

impl Podman {
    /// Takes the image over from Docker.
    fn with(image: &str) -> Option<Podman> {
        let missing = |why: &str| {
            eprintln!("no Podman is tested: {why}");
            None
        };
        if Path::new(PODMAN_CDI).join("mpsshim.json").exists() {
            return missing("this machine has the device");
        }
        let line = format!("podman --version && docker save {image} | podman load --quiet");
        let taken = Command::new("sh").args(["-c", &line]).output();
        let taken = Done::from(taken.expect("a shell"));
        let Some((_, loaded)) = taken.out.rsplit_once("Loaded image: ") else {
            return missing(taken.err.trim());
        };
        let podman = Podman {
            image: loaded.trim().to_owned(),
        };
        let tried = Done::from(podman.run(&[]).arg("true").output().expect("podman"));
        match tried.code {
            0 => Some(podman),
            _ => missing(tried.err.trim()),
        }
    }

    /// To be given a program.
    fn run(&self, options: &[&str]) -> Command {
        let mut command = Command::new("podman");
        command.args(["run", "--rm", "--network", "none", "--runtime", "runc"]);
        // By default as much as there is, which takes a right that not every root has.
        command.args([
            "--ulimit",
            "nofile=4096:4096",
            "--ulimit",
            "nproc=4096:4096",
        ]);
        command.args(options).arg(&self.image);
        command
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = Command::new("podman")
            .args(["rmi", "--force", &self.image])
            .output();
    }
}

/// What version 0.3 of the specification asks for; other keys than those it knows make an engine refuse the file.
fn is_specification(spec: &Value) {
    let keys = |value: &Value| -> Vec<String> {
        let object = value.as_object().expect("an object");
        object.keys().cloned().collect()
    };
    let texts = |value: &Value| -> Vec<String> {
        let array = value.as_array().expect("an array").iter();
        array
            .map(|text| text.as_str().expect("text").to_owned())
            .collect()
    };
    assert_eq!(keys(spec), ["cdiVersion", "devices", "kind"]);
    assert_eq!(spec["cdiVersion"], "0.3.0");
    assert_eq!(spec["kind"], "mpsshim.io/gpu");
    for device in spec["devices"].as_array().expect("devices") {
        assert_eq!(keys(device), ["containerEdits", "name"]);
        let name = device["name"].as_str().expect("name");
        assert!(!name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric()));
        let edits = &device["containerEdits"];
        assert_eq!(keys(edits), ["env", "mounts"]);
        assert!(
            texts(&edits["env"])
                .iter()
                .all(|variable| variable.contains('='))
        );
        for mount in edits["mounts"].as_array().expect("mounts") {
            assert_eq!(keys(mount), ["containerPath", "hostPath", "options"]);
            for path in ["containerPath", "hostPath"] {
                assert!(mount[path].as_str().expect(path).starts_with('/'));
            }
            assert!(texts(&mount["options"]).contains(&"bind".to_owned()));
        }
    }
}

#[test]
fn the_documented_line_is_the_dockerfile_s() {
    let steps = fs::read_to_string(root().join("packaging/containers/Dockerfile")).expect("file");
    for line in documented("One line in an image") {
        assert!(steps.lines().any(|step| step == line), "{line}");
    }
}

/// Docker's default seccomp profile permits no userfaultfd: faults of managed memory come by signals there.
#[test]
fn managed_memory_under_the_default_seccomp_profile() {
    if !containers() {
        return;
    }
    let image = format!("mpsshim-test-host:{}", std::process::id());
    let mut import = docker(&["import", "-", &image]);
    let import = import.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut import = import.spawn().expect("docker");
    // An archive without files.
    let mut archive = import.stdin.take().expect("a pipe");
    archive.write_all(&[0; 1024]).expect("written");
    drop(archive);
    assert!(import.wait().expect("docker").success());
    let _removed = Image(image.clone());
    let place = daemon();
    let programs = artifact("managed");
    let programs = programs.parent().expect("a folder");
    // The machine's own system, on which the programs were built.
    let system = ["/usr", "/lib", "/lib64", "/bin"].map(Path::new);
    let system = system.into_iter().filter(|path| path.exists());
    let mut options = vec!["--env=MPSSHIM_LOG=mpsshim::proxy::pages=info".to_owned()];
    for path in system.chain([programs]) {
        options.push(format!("--volume={0}:{0}:ro", path.display()));
    }
    let pipe = place.pipe().display();
    options.push(format!("--volume={pipe}:{pipe}"));
    options.push(format!("--env=MPSSHIM_PIPE_DIRECTORY={pipe}"));
    let file = |name| programs.join(name).display().to_string();
    options.push(format!("--env=LD_PRELOAD={}", file("libmpsshim.so")));
    options.push(format!(
        "--env=MPSSHIM_CUDA_LIBRARY={}",
        file("libsoftgpu.so")
    ));
    for mode in ["turns", "edges", "signals", "threads"] {
        let mut run = docker(&["run", "--rm", "--network=none", "--ipc=host", "--pid=host"]);
        run.args(&options).args([&image, &file("managed"), mode]);
        run.args(["--seconds", "0.5", "--most", "60000"]);
        let done = Done::from(run.output().expect("docker"));
        assert_eq!((done.code, done.out), (0, format!("{mode}: ok\n")));
        let said = "faults of managed memory come by signals, without userfaultfd";
        assert!(done.err.contains(said), "{mode}: {}", done.err);
    }
}

/// An image that is removed in the end.
struct Image(String);

impl Drop for Image {
    fn drop(&mut self) {
        remove(&["image", "rm", "--force", &self.0]);
    }
}
