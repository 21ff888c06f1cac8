//! A small HTTP client for the tests and the load generator: one request a connection.

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Status and head of an answer, with the connection to read its body.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: String,
    pub body: Body,
}

/// The unread part of a connection.
#[derive(Debug)]
pub struct Body {
    from: BufReader<TcpStream>,
    chunked: bool,
    length: Option<usize>,
}

/// Sends a request and reads the head of the answer.
pub fn send(to: SocketAddr, method: &str, path: &str, body: &[u8], headers: &str) -> io::Result<Reply> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(300)))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    )?;
    // A server that refuses the head may close before the whole body is sent; its answer is still readable.
    let _ = stream.write_all(body);
    let mut from = BufReader::new(stream);
    let mut line = String::new();
    from.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no status: {line:?}")))?;
    let mut headers = String::new();
    loop {
        line.clear();
        if from.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        headers.push_str(&line.to_lowercase());
    }
    let length = headers.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.and_then(|length| length.trim().parse().ok());
    let chunked = headers.contains("transfer-encoding: chunked");
    Ok(Reply { status, headers, body: Body { from, chunked, length } })
}

/// Requests a completion.
pub fn complete(to: SocketAddr, body: &Value) -> io::Result<Reply> {
    send(to, "POST", "/v1/completions", body.to_string().as_bytes(), "content-type: application/json\r\n")
}

impl Reply {
    pub fn text(mut self) -> io::Result<String> {
        let mut all = Vec::new();
        while let Some(chunk) = self.body.chunk()? {
            all.extend(chunk);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    pub fn json(self) -> io::Result<Value> {
        serde_json::from_str(&self.text()?).map_err(io::Error::other)
    }
}

impl Body {
    /// The next chunk of the body; `None` at its end.
    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let length = if self.chunked {
            let mut line = String::new();
            self.from.read_line(&mut line)?;
            usize::from_str_radix(line.trim(), 16)
                .map_err(|_| io::Error::from(io::ErrorKind::UnexpectedEof))?
        } else {
            self.length.take().unwrap_or(0)
        };
        if length == 0 {
            return Ok(None);
        }
        let mut bytes = vec![0; length];
        self.from.read_exact(&mut bytes)?;
        if self.chunked {
            self.from.read_exact(&mut [0; 2])?;
        }
        Ok(Some(bytes))
    }

    /// Data of the next server-sent events; a chunk has one or more of them.
    pub fn events(&mut self) -> io::Result<Option<Vec<String>>> {
        let Some(bytes) = self.chunk()? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Some(
            text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).map(String::from).collect(),
        ))
    }
}
