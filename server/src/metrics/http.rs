//! As much of HTTP as a scrape needs: one request a connection, one connection at a time, neither for long. Whoever wants to
//! harm the daemon by it only makes others' scrapes wait.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a peer may take to send its request, and to take each part of the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause when no connection can be accepted.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest request, bytes, and lines of its header.
const REQUEST_LIMIT: usize = 8 << 10;
const HEADERS_LIMIT: usize = 64;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// An answer: status, type, text.
type Answer = (&'static str, &'static str, String);

/// Answers requests for `/metrics` with what `scrape` says, for ever.
pub fn serve(listener: &TcpListener, mut scrape: impl FnMut() -> anyhow::Result<String>) {
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Err(error) = attend(stream, &mut scrape) {
                    tracing::debug!("scrape from {peer}: {error}");
                }
            }
            Err(error) => {
                tracing::warn!("Cannot accept a connection for metrics: {error}");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

fn attend(
    mut stream: TcpStream,
    scrape: &mut impl FnMut() -> anyhow::Result<String>,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = read(&mut stream)?;
    let (status, kind, text) = answer(&request, scrape);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes())?;
    if !request.starts_with(b"HEAD ") {
        stream.write_all(text.as_bytes())?;
    }
    stream.shutdown(Shutdown::Write)
}

/// The bytes of a request up to the empty line behind its header, or as many as there may be.
fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while request.len() < REQUEST_LIMIT {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer)? {
            0 => break,
            len => request.extend_from_slice(&buffer[..len]),
        }
        if request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            break;
        }
    }
    Ok(request)
}

fn answer(request: &[u8], scrape: &mut impl FnMut() -> anyhow::Result<String>) -> Answer {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_LIMIT];
    let mut parsed = httparse::Request::new(&mut headers);
    let whole = parsed
        .parse(request)
        .is_ok_and(|status| status.is_complete());
    let (Some(method), Some(path), true) = (parsed.method, parsed.path, whole) else {
        return ("400 Bad Request", TEXT, "this is no request\n".into());
    };
    let path = path.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET" | "HEAD", "/metrics") => match scrape() {
            Ok(text) => ("200 OK", OPEN_METRICS, text),
            Err(error) => ("503 Service Unavailable", TEXT, format!("{error:#}\n")),
        },
        ("GET" | "HEAD", _) => (
            "404 Not Found",
            TEXT,
            "the metrics are at /metrics\n".into(),
        ),
        _ => ("405 Method Not Allowed", TEXT, "only GET and HEAD\n".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> &'static str {
        answer(request, &mut || Ok("# EOF\n".into())).0
    }

    #[test]
    fn requests() {
        assert_eq!(
            status(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
            "200 OK"
        );
        assert_eq!(status(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"), "200 OK");
        assert_eq!(status(b"HEAD /metrics HTTP/1.1\r\n\r\n"), "200 OK");
        assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n"), "404 Not Found");
        assert_eq!(
            status(b"POST /metrics HTTP/1.1\r\n\r\n"),
            "405 Method Not Allowed"
        );
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        for request in [
            &b""[..],
            b"GET /metrics",
            b"\xff\xfe\r\n\r\n",
            many.as_bytes(),
        ] {
            assert_eq!(status(request), "400 Bad Request");
        }
        let failed = answer(b"GET /metrics HTTP/1.1\r\n\r\n", &mut || {
            anyhow::bail!("gone")
        });
        assert_eq!(
            (failed.0, failed.2.as_str()),
            ("503 Service Unavailable", "gone\n")
        );
    }
}
