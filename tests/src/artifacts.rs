//! The built libraries and programs that end-to-end tests start.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs};

/// The path of a built library or program, such as `libmpsshim.so` or `mps-server`.
///
/// Cargo does not build other packages' libraries and programs for a test, so this does, once per test process and
/// package, in the test's own profile and target folder. A test that is not started by cargo takes what lies there.
/// `MPSSHIM_SHIM` names another `libmpsshim.so`.
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
    build(package_of(name), &folder);
    let path = folder.join(name);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// The driver that end-to-end tests run on: softgpu, or what `MPSSHIM_TEST_DRIVER` names, such as the path of a
/// genuine `libcuda.so.1`.
pub fn driver() -> PathBuf {
    env::var_os("MPSSHIM_TEST_DRIVER").map_or_else(|| artifact("libsoftgpu.so"), PathBuf::from)
}

/// The package that a library or program belongs to.
fn package_of(name: &str) -> &str {
    match name {
        "libmpsshim.so" => "mpsshim",
        "libsoftgpu.so" => "softgpu",
        "libsoftnvml.so" => "softnvml",
        "mps-server" | "mps-control" | "mps-run" => "mpsshim-server",
        "mps-device-plugin" => "mpsshim-device-plugin",
        _ => "mpsshim-examples",
    }
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

fn build(package: &str, folder: &Path) {
    static DONE: Mutex<Option<HashMap<String, bool>>> = Mutex::new(None);
    let Some(cargo) = env::var_os("CARGO") else {
        return;
    };
    // Held through the build: another test that needs the package waits for it.
    let mut done = DONE.lock().expect("no build panics");
    let built = done
        .get_or_insert_default()
        .entry(package.to_owned())
        .or_insert_with(|| {
            let profile = match folder.file_name().and_then(|name| name.to_str()) {
                Some("debug") | None => "dev",
                Some(profile) => profile,
            };
            Command::new(cargo)
                .args([
                    "build",
                    "--quiet",
                    "--package",
                    package,
                    "--profile",
                    profile,
                    "--target-dir",
                ])
                .arg(target())
                .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
                .status()
                .is_ok_and(|status| status.success())
        });
    let built = *built;
    drop(done);
    assert!(built, "cargo build --package {package} failed");
}
