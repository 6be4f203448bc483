//! A running process: whether it has loaded the library and finds the daemon, and if not, why.

use super::Finding;
use crate::elf;
use crate::settings::{DISABLE, PIPE_DIRECTORY, Settings};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const CHECK: &str = "process";

/// The process with this id.
pub fn check(settings: &Settings, pid: i32) -> Vec<Finding> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let maps = match fs::read_to_string(folder.join("maps")) {
        Ok(maps) => maps,
        Err(error) => return vec![unreadable(pid, &error)],
    };
    let environment = fs::read(folder.join("environ")).unwrap_or_default();
    let mut findings = vec![match library_in(&maps) {
        Some(path) => Finding::ok(CHECK, format!("The process {pid} has loaded {path}.")),
        None => not_loaded(pid, &folder, &environment),
    }];
    findings.extend(replaced(pid, &maps));
    if variable(&environment, DISABLE).is_some_and(|value| value != "0") {
        findings.push(Finding::error(
            CHECK,
            format!(
                "The process {pid} has {DISABLE} in its environment and uses the genuine driver."
            ),
            "Start the program without it.",
        ));
    }
    findings.extend(directory(settings, pid, &folder, &environment));
    findings
}

fn unreadable(pid: i32, error: &io::Error) -> Finding {
    match error.kind() {
        io::ErrorKind::NotFound => Finding::error(
            CHECK,
            format!("There is no process {pid}."),
            "Give the process id that ps prints in this PID namespace.",
        ),
        _ => Finding::error(
            CHECK,
            format!("The process {pid} cannot be examined: {error}."),
            "Run mps-control doctor as the process's user or as root.",
        ),
    }
}

/// Path of the library in a list of mappings.
fn library_in(maps: &str) -> Option<&str> {
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_library = |path: &&str| {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        path.ends_with("/libmpsshim.so")
    };
    paths.into_iter().find(is_library)
}

/// A library that was replaced by another file since the process started.
fn replaced(pid: i32, maps: &str) -> Option<Finding> {
    library_in(maps)?.strip_suffix(" (deleted)").map(|path| {
        Finding::warning(
            CHECK,
            format!("The library {path} has been replaced since the process {pid} started."),
            "Restart the program if it is to use the installed release.",
        )
    })
}

/// Why a process has not loaded the library.
fn not_loaded(pid: i32, folder: &Path, environment: &[u8]) -> Finding {
    let told = format!("The process {pid} has not loaded the library and shares nothing");
    if let Some(why) = elf::not_preloading(folder.join("exe").as_os_str()) {
        let remedy = "Use a 64-bit, dynamically linked program without set-user-ID.";
        return Finding::error(CHECK, format!("{told}: {why}."), remedy);
    }
    if changes_user(folder) {
        return Finding::error(
            CHECK,
            format!(
                "{told}: it has changed its user, and the loader ignores LD_PRELOAD for set-user-ID programs."
            ),
            "Start the program itself with mps-run, as the user that it shall have.",
        );
    }
    match variable(environment, "LD_PRELOAD") {
        Some(list)
            if list
                .as_bytes()
                .windows(13)
                .any(|part| part == b"libmpsshim.so") =>
        {
            Finding::error(
                CHECK,
                format!(
                    "{told}, although its LD_PRELOAD is {}: the file does not exist where the process sees it, or cannot be loaded.",
                    list.display()
                ),
                "Use the path as the process sees it, in a container too; mps-run finds the library by itself.",
            )
        }
        _ => Finding::error(
            CHECK,
            format!("{told}: its environment has no LD_PRELOAD that names the library."),
            "Start the program with mps-run, or with LD_PRELOAD; env -i, sudo, su and some job launchers remove it.",
        ),
    }
}

/// Whether real and effective user differ.
fn changes_user(folder: &Path) -> bool {
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let users: Vec<&str> = users.unwrap_or_default().split_whitespace().collect();
    users.windows(2).any(|two| two[0] != two[1])
}

/// A variable in an environment as /proc shows it, unless it is empty.
fn variable(environment: &[u8], name: &str) -> Option<OsString> {
    let entries = environment.split(|byte| *byte == 0);
    let value = entries
        .into_iter()
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
    let value = value.filter(|value| !value.is_empty());
    value.map(|value| OsStr::from_bytes(value).to_owned())
}

/// Whether the process looks for the daemon in this program's pipe directory, and sees it.
fn directory(settings: &Settings, pid: i32, folder: &Path, environment: &[u8]) -> Option<Finding> {
    let here = &settings.pipe_directory;
    let set = variable(environment, PIPE_DIRECTORY).map(PathBuf::from);
    if let Some(there) = set
        .as_ref()
        .filter(|there| *there != here && there.is_absolute())
    {
        return Some(Finding::warning(
            CHECK,
            format!(
                "The process {pid} looks for the daemon in {}, and this program in {}.",
                there.display(),
                here.display()
            ),
            format!("Set {PIPE_DIRECTORY} to the same directory for both."),
        ));
    }
    let relative = here.strip_prefix("/").unwrap_or(here);
    let is_hidden = here.exists()
        && folder.join("root").exists()
        && !folder.join("root").join(relative).exists();
    is_hidden.then(|| {
        Finding::error(
            CHECK,
            format!(
                "The process {pid} has another mount namespace, in which there is no {}.",
                here.display()
            ),
            "Mount the directory into its container (docs/containers.md).",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_among_the_mappings() {
        let maps = "7f0-7f1 r-xp 0 08:01 7   /usr/lib/libc.so.6\n7f2-7f3 r-xp 0 08:01 8   /opt/a b/libmpsshim.so\n";
        assert_eq!(library_in(maps), Some("/opt/a b/libmpsshim.so"));
        assert_eq!(
            library_in("7f0-7f1 r-xp 0 08:01 7   /opt/libmpsshim.so.old\n"),
            None
        );
        let gone = "7f2-7f3 r-xp 0 08:01 8   /opt/libmpsshim.so (deleted)\n";
        assert!(replaced(7, gone).is_some() && replaced(7, maps).is_none());
    }

    #[test]
    fn variables_of_a_process_are_read() {
        let environment = b"A=1\0MPSSHIM_DISABLE=\0LD_PRELOAD=/opt/x y.so\0";
        assert_eq!(variable(environment, "A"), Some("1".into()));
        assert_eq!(
            variable(environment, "LD_PRELOAD"),
            Some("/opt/x y.so".into())
        );
        assert_eq!(variable(environment, "MPSSHIM_DISABLE"), None);
        assert_eq!(variable(environment, "LD"), None);
    }
}
