//! The operator's trace: every server, running or started later, appends to one file. The daemon writes the first and the
//! last line.

use super::{Server, Servers, State};
use crate::trace::Totals;
use nix::unistd::getpid;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;

/// State of a server's part in a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// It has no part in a trace.
    #[default]
    None,
    /// It was told to begin.
    Ordered,
    /// It writes.
    Writes,
    /// It was told to end.
    Ends,
    /// It has ended its part, or could not begin, while the trace goes on.
    Over,
}

/// A trace in progress.
pub struct Trace {
    file: File,
    path: String,
    totals: Totals,
    /// Problems so far.
    troubles: Vec<String>,
    ending: bool,
}

impl Server {
    pub(super) fn note_trace_start(&mut self, error: Option<String>) {
        self.part = match error {
            None => Part::Writes,
            Some(error) => {
                self.traced.push(Totals {
                    error: Some(error),
                    ..Totals::default()
                });
                Part::Over
            }
        };
    }

    pub(super) fn note_trace_end(&mut self, totals: Totals) {
        self.part = Part::Over;
        self.traced.push(totals);
    }
}

impl Servers {
    /// Begins a trace into a file that is open for appending; `path`: the path as given by the operator.
    ///
    /// # Errors
    /// The reason of a failure, in words.
    pub fn start_trace(&mut self, mut file: File, path: &str) -> Result<(), String> {
        if let Some(trace) = &self.trace {
            let other = &trace.path;
            return Err(format!(
                "a trace is being recorded already, to {other}; \"trace stop\" ends it"
            ));
        }
        let regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        if !regular {
            // The daemon must not wait for a reader.
            return Err(format!("{path} is not a regular file"));
        }
        let first = format!(
            "[\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{0},\"tid\":0,\"args\":{{\"name\":\"mpsshim {1} ({0})\"}}}}",
            getpid(),
            env!("CARGO_PKG_VERSION")
        );
        let begun = file
            .set_len(0)
            .and_then(|()| file.write_all((first + ",\n").as_bytes()));
        begun.map_err(|error| format!("cannot write {path}: {error}"))?;
        self.trace = Some(Trace {
            file,
            path: path.to_owned(),
            totals: Totals::default(),
            troubles: Vec::new(),
            ending: false,
        });
        self.order_traces();
        Ok(())
    }

    /// Orders servers that have not been told yet to trace.
    pub(super) fn order_traces(&mut self) {
        let Some(trace) = self.trace.as_mut().filter(|trace| !trace.ending) else {
            return;
        };
        let serves = |server: &&mut Server| {
            server.part == Part::None
                && matches!(server.state, State::Active | State::Stopping)
                && !server.link_full
        };
        for server in self.running.iter_mut().filter(serves) {
            match server
                .link
                .as_ref()
                .map(|link| link.order_trace(trace.file.as_fd()))
            {
                Some(Ok(())) => server.part = Part::Ordered,
                Some(Err(error)) if error.would_block() => server.link_full = true,
                Some(Err(error)) => trace
                    .troubles
                    .push(format!("server {}: {error}", server.pid)),
                None => {}
            }
        }
    }

    /// Ends the trace; [`Servers::finish_trace`] when [`Servers::is_tracing_settled`].
    ///
    /// # Errors
    /// There is none.
    pub fn stop_trace(&mut self) -> Result<(), String> {
        let trace = self.trace.as_mut().ok_or("no trace is being recorded")?;
        trace.ending = true;
        for server in &mut self.running {
            if matches!(server.part, Part::Ordered | Part::Writes) {
                match server.link.as_ref().map(|link| link.order_trace_end()) {
                    Some(Ok(())) => server.part = Part::Ends,
                    Some(Err(error)) => {
                        trace
                            .troubles
                            .push(format!("server {}: {error}", server.pid));
                        server.part = Part::None;
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// Whether every server has carried out its order.
    pub fn is_tracing_settled(&self) -> bool {
        let waits = |server: &Server| matches!(server.part, Part::Ordered | Part::Ends);
        !self.running.iter().any(waits)
    }

    /// Collects the reports of the servers about their parts.
    pub fn collect_traces(&mut self) {
        for server in &mut self.running {
            collect(&mut self.trace, server);
        }
    }

    /// A server has ended, and all its reports have been read.
    pub(super) fn end_trace_of(&mut self, server: &mut Server) {
        collect(&mut self.trace, server);
        if let Some(trace) = &mut self.trace
            && matches!(server.part, Part::Ordered | Part::Writes | Part::Ends)
        {
            let pid = server.pid;
            trace.troubles.push(format!(
                "server {pid} ended before it had written everything"
            ));
        }
    }

    /// Problems of the current trace.
    pub fn trace_troubles(&self) -> Vec<String> {
        let trace = self.trace.as_ref();
        trace.map_or_else(Vec::new, |trace| trace.troubles.clone())
    }

    /// Writes the last line. Returns whether the trace is complete, and a summary in words; `None`: there was no trace.
    pub fn finish_trace(&mut self) -> Option<(bool, String)> {
        let mut trace = self.trace.take()?;
        for server in &mut self.running {
            if server.part == Part::Ends {
                let pid = server.pid;
                trace.troubles.push(format!("server {pid} does not answer"));
            }
            server.part = Part::None;
        }
        let Totals { written, lost, .. } = trace.totals;
        let last = format!(
            "{{\"ph\":\"M\",\"name\":\"trace_end\",\"pid\":{},\"tid\":0,\"args\":{{\"slices\":{written},\"lost\":{lost}}}}}\n]\n",
            getpid()
        );
        if let Err(error) = trace.file.write_all(last.as_bytes()) {
            trace.troubles.push(error.to_string());
        }
        let path = &trace.path;
        let text = format!("{written} slices, {lost} lost, in {path}");
        tracing::info!("The trace has ended: {text}");
        if trace.troubles.is_empty() {
            return Some((true, text));
        }
        let troubles = trace.troubles.join("; ");
        Some((false, format!("{text}; the file is incomplete: {troubles}")))
    }
}

fn collect(trace: &mut Option<Trace>, server: &mut Server) {
    for totals in server.traced.drain(..) {
        let Some(trace) = trace else { continue };
        trace.totals.written += totals.written;
        trace.totals.lost += totals.lost;
        let trouble = totals
            .error
            .map(|error| format!("server {}: {error}", server.pid));
        trace.troubles.extend(trouble);
    }
}
