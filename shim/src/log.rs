//! Logging, silent unless `MPSSHIM_LOG` is set.
//!
//! `MPSSHIM_LOG=FILTER` logs to standard error, `MPSSHIM_LOG=FILTER:/path/to/file` appends to a file; the
//! path must be absolute, which distinguishes its colon from those of a filter. FILTER is a level (`error`, `warn`, `info`,
//! `debug`, `trace`) or a list such as `warn,mpsshim::mode=debug`.

use std::fs::{File, OpenOptions};
use std::io;
use std::sync::Once;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::settings;

/// Sets up logging at the first call. An invalid setting is reported on standard error, since the user who set it expects
/// output.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Some(setting) = settings::log() else {
            return;
        };
        if let Err(error) = start(&setting) {
            eprintln!("mpsshim: MPSSHIM_LOG={setting}: {error}");
        }
        for warning in settings::warnings() {
            tracing::warn!("{warning}");
        }
    });
}

fn start(setting: &str) -> Result<(), Box<dyn std::error::Error>> {
    let (filter, path) = split(setting);
    let filter = EnvFilter::try_new(filter)?;
    match path {
        Some(path) => subscribe(
            filter,
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map(Shared)?,
        ),
        None => subscribe(filter, io::stderr),
    }
    Ok(())
}

fn subscribe<W>(filter: EnvFilter, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(writer)
        .finish();
    // The shim has its own copy of tracing, so that no subscriber can have been set before.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Filter and file of a setting.
fn split(setting: &str) -> (&str, Option<&str>) {
    match setting.find(":/") {
        Some(colon) => (&setting[..colon], Some(&setting[colon + 1..])),
        None => (setting, None),
    }
}

/// A log file. Each event is one write in append mode, so that processes that share the file do not mix lines.
struct Shared(File);

impl<'a> MakeWriter<'a> for Shared {
    type Writer = &'a File;

    fn make_writer(&'a self) -> Self::Writer {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_follows_the_filter() {
        assert_eq!(split("debug"), ("debug", None));
        assert_eq!(
            split("warn,mpsshim::mode=trace"),
            ("warn,mpsshim::mode=trace", None)
        );
        assert_eq!(
            split("mpsshim::mode=trace:/tmp/a:/b"),
            ("mpsshim::mode=trace", Some("/tmp/a:/b"))
        );
    }
}
