//! MPI programs as clients: `examples/mpi` with every MPI that is installed, and the commands of docs/mpi.md.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::{artifact, driver, write_program};
use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use mpsshim_tests::programs::{Running, shell};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

const RANKS: usize = 4;
/// Where docs/mpi.md has the library.
const INSTALLED: &str = "/usr/lib/mpsshim/libmpsshim.so";

/// An MPI with the example built by it.
struct Mpi {
    /// Its section in docs/mpi.md.
    name: &'static str,
    /// `mpirun` and `heat`.
    folder: TempDir,
}

static INSTALLED_MPIS: LazyLock<Vec<Mpi>> = LazyLock::new(|| {
    let found: Vec<Mpi> = [("openmpi", "open-mpi.org"), ("mpich", "HYDRA")]
        .iter()
        .filter_map(|(suffix, version)| Mpi::find(suffix, version))
        .collect();
    if found.is_empty() {
        eprintln!("no MPI is installed (mpicc and mpirun of OpenMPI or MPICH): MPI is not tested");
    }
    found
});

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    places.find(|place| place.is_file())
}

impl Mpi {
    /// Under Debian's names, where several can be installed, or as `mpirun`.
    fn find(suffix: &str, sign: &str) -> Option<Mpi> {
        let names = [format!(".{suffix}"), String::new()];
        let (mpirun, mpicc) = names.iter().find_map(|ending| {
            let mpirun = in_path(&format!("mpirun{ending}"))?;
            let mpicc = in_path(&format!("mpicc{ending}"))?;
            let told = Command::new(&mpirun).arg("--version").output().ok()?;
            Done::from(told)
                .out
                .contains(sign)
                .then_some((mpirun, mpicc))
        })?;
        let folder = TempDir::with_prefix("mpi-").expect("directory");
        for file in ["heat.c", "Makefile"] {
            let from = root().join("examples/mpi").join(file);
            fs::copy(from, folder.path().join(file)).expect(file);
        }
        let made = Command::new("make")
            .arg(format!("MPICC={}", mpicc.display()))
            .arg("CFLAGS=-O2 -Wall -Wextra -Werror")
            .current_dir(folder.path())
            .output();
        let made = Done::from(made.expect("make is installed"));
        assert_eq!((made.code, made.err.as_str()), (0, ""), "{}", made.out);
        let script = folder.path().join("mpirun");
        let text = format!("#!/bin/sh\nexec {} \"$@\"\n", mpirun.display());
        write_program(&script, &text);
        Some(Mpi {
            name: if suffix == "mpich" {
                "MPICH"
            } else {
                "OpenMPI"
            },
            folder,
        })
    }

    /// mpirun's options that give the ranks a variable.
    fn give(&self, name: &str, value: &str) -> Vec<String> {
        match self.name {
            "MPICH" => vec!["-genv".into(), name.into(), value.into()],
            _ => vec!["-x".into(), format!("{name}={value}")],
        }
    }

    fn preload(&self) -> Vec<String> {
        let shim = artifact("libmpsshim.so");
        self.give("LD_PRELOAD", shim.to_str().expect("text"))
    }

    /// A line for the shell, as a user would type it beside `heat`.
    fn shell(&self, place: &Place, line: &str) -> Done {
        let mut command = shell(place, self.folder.path(), line);
        command
            .env("MPSSHIM_SERVER", artifact("mps-server"))
            .env("MPSSHIM_LIBRARY", artifact("libmpsshim.so"))
            .env("MPSSHIM_CUDA_LIBRARY", driver())
            .env_remove("CUDA_VISIBLE_DEVICES")
            // OpenMPI 4: tests run as root and with few cores; then the same for 5.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            // Two that start at the same moment would both make the folder of the user's jobs, and one fails.
            .env("OMPI_MCA_orte_tmpdir_base", place.path())
            .env("PRTE_ALLOW_RUN_AS_ROOT", "1")
            .env("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
            .env("PRTE_MCA_prte_tmpdir_base", place.path());
        for name in ["MPSSHIM_MODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] {
            command.env_remove(name);
        }
        // Its end shows too that no daemon holds what mpirun waits for.
        Running::start(&mut command).finish(PATIENCE)
    }

    /// mpirun with these options and words.
    fn run(&self, place: &Place, ranks: usize, options: &[String], words: &str) -> Done {
        let options = options.join(" ");
        self.shell(place, &format!("mpirun {options} -np {ranks} {words}"))
    }
}

/// A place whose daemon starts real servers.
fn with_daemon() -> Place {
    let server = artifact("mps-server");
    let driver = driver();
    Place::with_daemon_env(&[
        ("MPSSHIM_SERVER", server.to_str().expect("text")),
        ("MPSSHIM_CUDA_LIBRARY", driver.to_str().expect("text")),
    ])
}

/// The line that begins so, of a program that must have succeeded.
fn line<'a>(done: &'a Done, beginning: &str) -> &'a str {
    assert_eq!(done.code, 0, "{} {}", done.out, done.err);
    let mut lines = done.out.lines();
    lines
        .find(|line| line.starts_with(beginning))
        .unwrap_or_else(|| panic!("no {beginning} in {}", done.out))
}

/// The clients that have come, and how many servers were started for them.
fn clients_and_servers(place: &Place) -> (BTreeSet<String>, usize) {
    let log = place.log("control.log");
    let after = |line: &str, word: &str| {
        let (_, rest) = line.split_once(word)?;
        rest.split_whitespace().next().map(str::to_owned)
    };
    let clients = log.lines().filter_map(|line| after(line, "NEW CLIENT "));
    (
        clients.collect(),
        log.matches("Starting new server").count(),
    )
}

const SMALL: &str = "--size 50 --steps 12";

#[test]
fn ranks_share_one_server_and_give_the_result_of_one() {
    for mpi in INSTALLED_MPIS.iter() {
        let place = with_daemon();
        let alone = mpi.run(&place, 1, &mpi.preload(), &format!("./heat {SMALL}"));
        let alone = line(&alone, "checksum").to_owned();
        let mut came = clients_and_servers(&place).0.len();
        assert_eq!(came, 1);
        let forms = [
            (mpi.preload(), "./heat"),
            (vec![], "mps-run ./heat"),
            (mpi.preload(), "./heat --halo device"),
        ];
        for (options, program) in forms {
            let words = format!("{program} {SMALL} --verify");
            let done = mpi.run(&place, RANKS, &options, &words);
            assert_eq!(line(&done, "checksum"), alone, "{} {words}", mpi.name);
            line(&done, "verified: one rank alone gives the same");
            line(&done, "4 ranks on ");
            let (clients, servers) = clients_and_servers(&place);
            assert_eq!((clients.len(), servers), (came + RANKS, 1), "{words}");
            came = clients.len();
        }
    }
}

#[test]
fn ranks_start_one_daemon() {
    for mpi in INSTALLED_MPIS.iter() {
        let place = Place::new();
        let words = format!("mps-run ./heat {SMALL} --verify");
        line(&mpi.run(&place, RANKS, &[], &words), "verified");
        let (clients, servers) = clients_and_servers(&place);
        assert_eq!((clients.len(), servers), (RANKS, 1));
        let log = place.log("control.log");
        assert_eq!(log.matches("Starting control daemon").count(), 1);
    }
}

#[test]
fn limits_are_given_to_all_ranks() {
    for mpi in INSTALLED_MPIS.iter() {
        let place = with_daemon();
        let mut options = mpi.give("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25");
        options.extend(mpi.give("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=64M"));
        let preload = [options.clone(), mpi.preload()].concat();
        for (options, program) in [(&options, "mps-run ./heat"), (&preload, "./heat")] {
            let done = mpi.run(&place, RANKS, options, &format!("{program} {SMALL}"));
            let what = line(&done, "4 ranks on ");
            assert!(
                what.ends_with("at least 1 multiprocessors and 64 MiB"),
                "{what}"
            );
        }
        // A quarter of two states of 8192 rows of 32 KiB is 128 MiB.
        let done = mpi.run(&place, RANKS, &preload, "./heat --size 8192 --steps 1");
        assert_ne!(done.code, 0);
        assert!(
            done.err.contains("CUDA_ERROR_OUT_OF_MEMORY"),
            "{}",
            done.err
        );
        assert!(done.err.contains("heat: rank "), "{}", done.err);
    }
}

/// The indented lines of a section that are commands of that name.
fn documented<'a>(text: &'a str, section: &str, command: &str) -> Vec<&'a str> {
    let begin = text
        .find(&format!("\n## {section}\n"))
        .unwrap_or_else(|| panic!("no section {section}"))
        + 4;
    let rest = &text[begin..];
    let section = &rest[..rest.find("\n## ").unwrap_or(rest.len())];
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    lines.filter(|line| line.starts_with(command)).collect()
}

#[test]
fn documented_commands_work() {
    let text = fs::read_to_string(root().join("docs/mpi.md")).expect("docs/mpi.md");
    let shim = artifact("libmpsshim.so");
    for mpi in INSTALLED_MPIS.iter() {
        let mut commands = documented(&text, mpi.name, "mpirun");
        assert!(commands.len() >= 4, "{}", mpi.name);
        if mpi.name == "MPICH" {
            commands.extend(documented(&text, "Which mode", "mpirun"));
        }
        let place = with_daemon();
        for command in commands {
            let line_of_it = command
                .replace("./heat", &format!("./heat {SMALL} --verify"))
                .replace(INSTALLED, shim.to_str().expect("text"))
                .replace("/tmp/mpsshim-jobs", place.pipe().to_str().expect("text"));
            let before = clients_and_servers(&place).0.len();
            line(&mpi.shell(&place, &line_of_it), "verified");
            let after = clients_and_servers(&place).0.len();
            assert_eq!(after - before, RANKS, "{command}");
        }
        wait_until("all have gone", || place.ps().is_empty());
    }
}

#[test]
fn the_example_refuses_what_makes_no_sense() {
    for mpi in INSTALLED_MPIS.iter() {
        let place = Place::new();
        for (words, why) in [
            ("--size 0", "--size must be 1 to 32768, not 0"),
            ("--size 12x", "--size must be 1 to 32768, not 12x"),
            ("--halo both", "--halo must be host or device, not both"),
            ("--steps", "a value is missing after --steps"),
            ("--fast", "there is no option --fast"),
            ("7", "no argument was expected: 7"),
        ] {
            let done = mpi.run(&place, 1, &[], &format!("./heat {words}"));
            assert_eq!(done.code, 2, "{words}");
            assert!(done.err.contains(why), "{words}: {}", done.err);
        }
        let help = mpi.run(&place, 1, &[], "./heat --help");
        assert!(line(&help, "Usage").contains("mpirun"), "{}", help.out);
    }
}
