//! mps-control under the name of NVIDIA's tool, and the parts of the packages that give it this name.

use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Done, Place};
use mpsshim_tests::programs::{client, succeed};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const NAME: &str = "nvidia-cuda-mps-control";

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// A line for the shell that calls mps-control by NVIDIA's name, with NVIDIA's variables in `place`.
fn run(place: &Place, line: &str) -> Done {
    let name = place.path().join(NAME);
    if !name.exists() {
        symlink(artifact("mps-control"), &name).expect("link");
    }
    let mut command = place.command_like(&place.command("mps-control"), "sh");
    let command = command
        .args(["-c", line])
        .current_dir(place.path())
        .env_remove("MPSSHIM_PIPE_DIRECTORY")
        .env_remove("MPSSHIM_LOG_DIRECTORY")
        .env("MPSSHIM_SERVER", artifact("mps-server"))
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .env("CUDA_MPS_PIPE_DIRECTORY", place.path().join("nvidia"))
        .env("CUDA_MPS_LOG_DIRECTORY", place.path().join("nvidia-logs"));
    command.output().expect("run").into()
}

fn is_silent(done: &Done) {
    assert_eq!(
        (done.code, done.out.as_str(), done.err.as_str()),
        (0, "", "")
    );
}

#[test]
fn guides_for_nvidia_s_tool_work() {
    let mut place = Place::new();
    is_silent(&run(&place, &format!("./{NAME} -d")));
    let pipe = place.path().join("nvidia/mpsshim");
    assert!(pipe.join("control").exists());
    assert!(
        !place.path().join("nvidia/control").exists(),
        "the genuine driver looks there"
    );
    assert!(place.path().join("nvidia-logs/control.log").exists());
    let again = run(&place, &format!("./{NAME} -d"));
    assert_eq!(again.code, 1);
    assert!(
        again
            .err
            .contains("An instance of this daemon is already running"),
        "{}",
        again.err
    );
    is_silent(&run(&place, &format!("echo get_server_list | ./{NAME}")));
    // By its own name with the product's variable.
    place.set_pipe(&pipe);
    let info = place.control(&["info"]);
    assert!(
        info.out
            .contains(&format!("pipe_directory: {}\n", pipe.display())),
        "{}",
        info.out
    );
    // A program has nothing but the library and NVIDIA's variable.
    let mut program = client(&place, &["work", "1"]);
    program
        .env_remove("MPSSHIM_PIPE_DIRECTORY")
        .env("XDG_RUNTIME_DIR", place.path().join("nothing"))
        .env("CUDA_MPS_PIPE_DIRECTORY", place.path().join("nvidia"));
    assert_eq!(succeed(&mut program), "busy\n");
    assert!(place.path().join("nvidia-logs/server.log").exists());
    is_silent(&run(&place, &format!("echo quit | ./{NAME}")));
    let gone = run(&place, &format!("echo get_server_list | ./{NAME}"));
    assert_eq!(gone.code, 1);
    assert!(
        gone.err.contains("Cannot find MPS control daemon process"),
        "{}",
        gone.err
    );
}

#[test]
fn the_product_s_own_settings_take_precedence() {
    let place = Place::with_daemon();
    let pipe = place.pipe().display();
    let info = run(
        &place,
        &format!("MPSSHIM_PIPE_DIRECTORY={pipe} ./{NAME} info"),
    );
    assert!(
        info.out.contains(&format!("pipe_directory: {pipe}\n")),
        "{}{}",
        info.out,
        info.err
    );
}

/// The archive's script in a tree like the archive's; returns the tree's script.
fn archive(root: &Path) -> PathBuf {
    let share = root.join("share/mpsshim");
    fs::create_dir_all(&share).expect("create");
    fs::create_dir(root.join("bin")).expect("create");
    symlink(artifact("mps-control"), root.join("bin/mps-control")).expect("link");
    let script = share.join("nvidia-names");
    fs::copy(file("packaging/nvidia-names"), &script).expect("copy");
    script
}

#[test]
fn the_archive_s_script_links_and_replaces_nothing() {
    let place = Place::new();
    let root = place.path().canonicalize().expect("a path");
    let script = archive(&root);
    let run = |arguments: &[&Path]| -> Done {
        let mut command = Command::new("sh");
        let command = command.arg(&script).args(arguments).stdin(Stdio::null());
        command.output().expect("sh").into()
    };
    is_silent(&run(&[]));
    let link = root.join("bin").join(NAME);
    assert_eq!(
        fs::read_link(&link).expect("link"),
        root.join("bin/mps-control")
    );
    is_silent(&run(&[]));
    let other = root.join("other");
    fs::create_dir(&other).expect("create");
    fs::write(other.join(NAME), "NVIDIA's").expect("write");
    let refused = run(&[&other]);
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("exists and is not replaced"),
        "{}",
        refused.err
    );
    assert_eq!(
        fs::read_to_string(other.join(NAME)).expect("read"),
        "NVIDIA's"
    );
}

#[test]
fn the_debian_package_refuses_to_replace_a_file() {
    let place = Place::new();
    let install = |what: &str| -> Done {
        let mut command = Command::new("sh");
        let command = command
            .arg(file("packaging/debian/nvidia-names/preinst"))
            .arg(what);
        command
            .env("DPKG_ROOT", place.path())
            .output()
            .expect("sh")
            .into()
    };
    is_silent(&install("install"));
    let bin = place.path().join("usr/bin");
    fs::create_dir_all(&bin).expect("create");
    fs::write(bin.join(NAME), "NVIDIA's").expect("write");
    let refused = install("install");
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("exists and is not replaced"),
        "{}",
        refused.err
    );
    fs::remove_file(bin.join(NAME)).expect("remove");
    symlink("mps-control", bin.join(NAME)).expect("link");
    is_silent(&install("upgrade"));
    is_silent(&install("install"));
}
