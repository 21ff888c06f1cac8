//! Another library in a process of its own, which answers a line with a line.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running peer.
pub struct Peer {
    /// Name and version, which the peer greets with.
    pub name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a command, whose words are separated by spaces.
    pub fn start(command: &str) -> Result<Peer, Box<dyn Error>> {
        let mut words = command.split_whitespace();
        let program = words.next().ok_or("--peer: no command")?;
        let mut child =
            Command::new(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("no output")?);
        let mut peer = Peer { name: String::new(), child, input, output: BufReader::new(output) };
        peer.name = peer.line()?;
        Ok(peer)
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err(format!("{} ended", self.name).into()),
            _ => Ok(line.trim().to_owned()),
        }
    }

    /// The answer to a request.
    pub fn ask(&mut self, request: &str) -> Result<String, Box<dyn Error>> {
        let input = self.input.as_mut().ok_or("no input")?;
        writeln!(input, "{request}")?;
        input.flush()?;
        self.line()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Without input it ends.
        self.input = None;
        let _ = self.child.wait();
    }
}
