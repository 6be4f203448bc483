//! The built libraries and programs that end-to-end tests start.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::{env, fs};

/// Whose libraries and programs tests start.
const PACKAGES: [&str; 6] = [
    "mpsshim",
    "mpsshim-server",
    "mpsshim-device-plugin",
    "mpsshim-examples",
    "softgpu",
    "softnvml",
];

/// The path of a built library or program, such as `libmpsshim.so` or `mps-server`.
///
/// Cargo does not build other packages' libraries and programs for a test, so this does, once per test process, in the
/// test's own profile and target folder. A test that is not started by cargo takes what lies there, and so does one with
/// `MPSSHIM_BUILT` in its environment: scripts/test.sh has built everything. `MPSSHIM_SHIM` names another
/// `libmpsshim.so`.
///
/// # Panics
/// When the build fails or there is no such file: no test can go on without.
pub fn artifact(name: &str) -> PathBuf {
    if name == "libmpsshim.so"
        && let Some(path) = env::var_os("MPSSHIM_SHIM")
    {
        return PathBuf::from(path);
    }
    let folder = folder();
    static BUILT: LazyLock<bool> = LazyLock::new(build);
    assert!(*BUILT, "cargo build failed");
    let path = folder.join(name);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// The driver that end-to-end tests run on: softgpu, or what `MPSSHIM_TEST_DRIVER` names, such as the path of a
/// genuine `libcuda.so.1`.
pub fn driver() -> PathBuf {
    env::var_os("MPSSHIM_TEST_DRIVER").map_or_else(|| artifact("libsoftgpu.so"), PathBuf::from)
}

/// Writes a program, such as a script.
///
/// # Panics
/// When it cannot be written.
pub fn write_program(path: &Path, text: &str) {
    fs::write(path, text).expect("a program");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("executable");
}

/// Cargo's target folder.
pub fn target() -> PathBuf {
    let folder = folder();
    folder.parent().expect("target/PROFILE has a parent").into()
}

/// `target/PROFILE`: test programs lie in its `deps`.
fn folder() -> PathBuf {
    let test = env::current_exe().expect("a running program has a file");
    let test = fs::canonicalize(&test).unwrap_or(test);
    let deps = test.parent().expect("a file has a folder");
    if deps.ends_with("deps") {
        deps.parent().expect("deps has a parent")
    } else {
        deps
    }
    .to_owned()
}

/// Builds what tests start; whether that is possible. Always all of it: cargo would give shared dependencies other
/// features for each choice of packages, and build them again.
fn build() -> bool {
    let cargo = env::var_os("CARGO");
    let Some(cargo) = cargo.filter(|_| env::var_os("MPSSHIM_BUILT").is_none()) else {
        return true;
    };
    let folder = folder();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--profile", profile, "--target-dir"]);
    command.arg(target());
    for package in PACKAGES {
        command.args(["--package", package]);
    }
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.status().is_ok_and(|status| status.success())
}
