//! Limits of this user's processes, and the kernel's features that library and server use.

use super::Finding;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::unistd::{AccessFlags, access, geteuid};
use std::fs;
use std::path::{Path, PathBuf};

/// Descriptors that a server with many clients needs.
const DESCRIPTORS: u64 = 4096;
/// Locked memory below which registering memory may fail, bytes.
const LOCKED: u64 = 64 << 10;
/// Addresses that clients and server reserve, bytes, without the 1 TiB for each device.
const ADDRESSES: u64 = 17 << 40;
/// Memory of a cgroup in which a server does not start well, bytes.
const LITTLE_MEMORY: u64 = 1 << 30;

/// All limits.
pub fn check() -> Vec<Finding> {
    let mut findings = vec![descriptors(), locked(), addresses()];
    findings.extend(cgroup());
    findings.push(memory_files());
    findings.push(managed_faults());
    findings
}

/// The hard limit, to which daemon and servers raise theirs.
fn descriptors() -> Finding {
    let check = "open files";
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, hard)) if hard < DESCRIPTORS => Finding::warning(
            check,
            format!(
                "A process may have {hard} descriptors, too few for a server with many clients."
            ),
            "Raise the hard limit (ulimit -Hn, LimitNOFILE) before the daemon starts.",
        ),
        Ok((soft, hard)) => Finding::ok(
            check,
            format!("A process may have {soft} descriptors, daemon and servers {hard}."),
        ),
        Err(error) => unknown(check, error.desc()),
    }
}

fn locked() -> Finding {
    let check = "locked memory";
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((_, RLIM_INFINITY)) => Finding::ok(check, "Locked memory is not limited."),
        Ok((_, hard)) if hard < LOCKED => Finding::warning(
            check,
            format!(
                "A process may lock {hard} bytes of memory, with which pinned memory may fail."
            ),
            "Raise the limit (ulimit -l unlimited, LimitMEMLOCK) before the daemon starts.",
        ),
        Ok((_, hard)) => Finding::ok(
            check,
            format!("A process may lock {} KiB of memory.", hard >> 10),
        ),
        Err(error) => unknown(check, error.desc()),
    }
}

fn addresses() -> Finding {
    let check = "addresses";
    match getrlimit(Resource::RLIMIT_AS) {
        Ok((RLIM_INFINITY, _)) => Finding::ok(check, "The address space is not limited."),
        Ok((soft, _)) if soft < ADDRESSES => Finding::warning(
            check,
            format!(
                "The address space is limited to {} MiB, so pinned host memory is refused.",
                soft >> 20
            ),
            "Remove the limit: ulimit -v unlimited.",
        ),
        Ok((soft, _)) => Finding::ok(
            check,
            format!("The address space is limited to {} TiB.", soft >> 40),
        ),
        Err(error) => unknown(check, error.desc()),
    }
}

fn unknown(check: &'static str, why: &str) -> Finding {
    let text = format!("The limit cannot be read: {why}.");
    Finding::warning(check, text, "Check that it is high enough with ulimit -a.")
}

/// The memory of this process's cgroup (version 2), if it is limited.
fn cgroup() -> Option<Finding> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folder = PathBuf::from(format!("/sys/fs/cgroup{group}"));
    let number = |file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    Some(memory(number("memory.max")?, number("memory.current")?))
}

/// A limit of memory and its use, bytes.
fn memory(limit: u64, used: u64) -> Finding {
    let check = "memory";
    let (of, left) = (limit >> 20, limit.saturating_sub(used) >> 20);
    let text = format!("The cgroup may have {of} MiB, of which {left} MiB are left.");
    if limit < LITTLE_MEMORY || limit.saturating_sub(used) < limit / 20 {
        let remedy = "Raise the memory limit of the container or the service.";
        return Finding::warning(check, text, remedy);
    }
    Finding::ok(check, text)
}

/// Library and server share memory by files without a name, and need neither /dev/shm nor its size.
fn memory_files() -> Finding {
    let check = "shared memory";
    match memfd_create(c"doctor", MFdFlags::MFD_CLOEXEC) {
        Ok(_) => Finding::ok(check, "Memory files (memfd_create) are available."),
        Err(error) => Finding::error(
            check,
            format!(
                "memfd_create fails: {}; clients and server cannot share memory.",
                error.desc()
            ),
            "Allow the system call in the container's seccomp profile.",
        ),
    }
}

/// How the library learns of the host's accesses to managed memory.
fn managed_faults() -> Finding {
    let check = "managed memory";
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let device = Path::new("/dev/userfaultfd");
    let is_open = access(device, AccessFlags::R_OK | AccessFlags::W_OK).is_ok();
    let is_allowed = sysctl.as_ref().is_ok_and(|value| value.trim() == "1");
    let needed =
        std::env::var("MPSSHIM_MANAGED_FAULTS").is_ok_and(|value| value.trim() == "userfaultfd");
    if is_open || is_allowed || (geteuid().is_root() && sysctl.is_ok()) {
        return Finding::ok(
            check,
            "This user may use userfaultfd, unless a seccomp profile forbids it.",
        );
    }
    if needed {
        return Finding::warning(
            check,
            "MPSSHIM_MANAGED_FAULTS asks for userfaultfd, which this user may not use.",
            "Give access to /dev/userfaultfd, or set the sysctl vm.unprivileged_userfaultfd to 1.",
        );
    }
    Finding::ok(
        check,
        "This user may not use userfaultfd, so the library catches accesses of the host by SIGSEGV.",
    )
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn little_memory_is_a_warning() {
        assert_eq!(memory(8 << 30, 1 << 30).state, State::Ok);
        assert_eq!(memory(512 << 20, 0).state, State::Warning);
        let full = memory(8 << 30, 8 << 30);
        assert_eq!(full.state, State::Warning);
        assert!(full.text.contains("8192 MiB, of which 0 MiB"), "{full:?}");
    }
}
