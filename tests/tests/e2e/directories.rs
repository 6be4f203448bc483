//! Where daemon and programs meet when nobody has named a directory, and whose directories they do not trust.

use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Done, Place, other_user};
use mpsshim_tests::programs::{finish, preloaded};
use mpsshim_tests::scene::daemon;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const NAMED: &str = "MPSSHIM_PIPE_DIRECTORY";

/// A short program whose library says what it does.
fn program(pipe: &Path) -> Command {
    let mut command = preloaded(artifact("nbody"), pipe);
    command
        .args(["-benchmark", "-numbodies=64", "-i=2"])
        .env("MPSSHIM_LOG", "info");
    command
}

/// What the library of a program says, which must succeed.
fn said(command: &mut Command) -> String {
    let done = finish(command);
    assert_eq!(done.code, 0, "{}", done.err);
    done.err
}

#[test]
fn a_user_s_daemon_and_programs_meet_in_the_runtime_directory() {
    let mut place = Place::new();
    let runtime = place.path().join("runtime");
    fs::create_dir(&runtime).expect("create");
    if let Some(user) = other_user() {
        chown(&runtime, Some(user), Some(user)).expect("chown");
        place.become_user(user);
    }
    let pipe = runtime.join("mpsshim");
    place.set_pipe(&pipe);
    for (name, file) in [
        ("MPSSHIM_SERVER", artifact("mps-server")),
        ("MPSSHIM_CUDA_LIBRARY", driver()),
    ] {
        place.set_env(name, file.to_str().expect("text"));
    }
    let unnamed = |mut command: Command| {
        command
            .env_remove(NAMED)
            .env("XDG_RUNTIME_DIR", &runtime)
            .env("LD_LIBRARY_PATH", driver().parent().expect("a folder"));
        if let Some(user) = other_user() {
            command.uid(user).gid(user);
        }
        command
    };
    let control = |arguments: &[&str]| -> Done {
        let mut command = unnamed(place.command("mps-control"));
        command.args(arguments).output().expect("run").into()
    };
    let started = control(&["-d"]);
    assert_eq!((started.code, started.err.as_str()), (0, ""));
    let mode = fs::metadata(&pipe).expect("made").permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);

    let info = control(&["info", "--format=json"]).out;
    let info: serde_json::Value = serde_json::from_str(&info).expect(&info);
    let info = &info[0];
    assert_eq!(info["pipe_directory"], pipe.to_str().expect("text"));
    assert_eq!(
        info["log_directory"],
        pipe.join("logs").to_str().expect("text")
    );
    assert_eq!(info["uid"], place.uid());
    assert_eq!(info["pid"], place.daemon_pid());
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(info["mode"], "proxy");
    assert_eq!(
        (&info["users"], &info["multi_user"]),
        (&"serial".into(), &false.into())
    );
    assert_eq!((&info["servers"], &info["clients"]), (&0.into(), &0.into()));
    assert!(
        info["devices"]
            .as_str()
            .is_some_and(|devices| devices.starts_with("GPU-")),
        "{info}"
    );
    let library = artifact("libmpsshim.so").canonicalize().expect("library");
    assert_eq!(info["library"], library.to_str().expect("text"));
    let line = format!("pipe_directory: {}\n", pipe.display());
    assert!(control(&["info"]).out.starts_with(&line));

    let log = said(&mut unnamed(program(&pipe)));
    let found = format!("connecting to the daemon directory={}", pipe.display());
    assert!(log.contains(&found) && log.contains("connected"), "{log}");

    // `mps-run` starts no second daemon, and names the directory for the program.
    let mut run = unnamed(place.command("mps-run"));
    let run = run.args(["sh", "-c", &format!("echo ${NAMED}")]).output();
    let run = Done::from(run.expect("run"));
    assert_eq!(run.out, format!("{}\n", pipe.display()), "{}", run.err);
    assert_eq!(control(&["quit"]).code, 0);
}

#[test]
fn a_directory_that_others_could_have_changed_is_taken_for_no_daemon() {
    let place = daemon();
    let refused = |why: &str| {
        let log = said(&mut program(place.pipe()));
        assert!(
            log.contains("not accepted as a daemon") && log.contains(why),
            "{log}"
        );
        assert!(log.contains("on the genuine driver, unshared"), "{log}");
        let run = place.command("mps-run").arg("true").output();
        let run = Done::from(run.expect("run"));
        assert_eq!(run.code, 125);
        assert!(
            run.err.contains("is not used") && run.err.contains(why),
            "{}",
            run.err
        );
    };
    let mode = |mode| fs::set_permissions(place.pipe(), Permissions::from_mode(mode));
    for open in [0o777, 0o1777] {
        mode(open).expect("mode");
        refused("others can write in");
        let list = place.control(&["get_server_list"]);
        assert_eq!(list.code, 1);
        assert!(
            list.err.contains("is not used: others can write in"),
            "{}",
            list.err
        );
    }
    mode(0o755).expect("mode");
    if let Some(user) = other_user() {
        chown(place.pipe(), Some(user), None).expect("chown");
        refused(&format!("belongs to user {user}"));
        // Root may look after the daemon of a user whose directory it names.
        assert_eq!(place.control(&["get_server_list"]).code, 0);
        chown(place.pipe(), Some(0), None).expect("chown");
    }
    let log = said(&mut program(place.pipe()));
    assert!(log.contains("connected"), "{log}");
}
