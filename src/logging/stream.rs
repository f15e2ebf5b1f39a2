//! Standard error and standard output. Nobody may read them: a pipe is full, a terminal is stopped. A write would then
//! block a thread of the runtime, and with it the server. A line that cannot be written is lost instead, and counted.

use std::{
    io::{self, IsTerminal as _},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
};

/// Maximum time that lines wait for the reader in each second, unless the line before was lost. Meanwhile the thread serves
/// nobody.
const WAIT: Duration = Duration::from_millis(100);
const WAIT_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes that a pipe takes without blocking if it is writable: PIPE_BUF.
const PIPE_BYTES: usize = 4096;
/// The same for a terminal. Linux calls one writable that takes 256 bytes, and adds a byte to each line.
const TERMINAL_BYTES: usize = 128;

/// Returns the line that reports this number of lost lines.
pub(super) type Notice = fn(u64) -> String;

pub(super) struct Stream<F> {
    file: F,
    piece_bytes: usize,
    state: Mutex<State>,
}

struct State {
    /// Time that lines may still wait, and since when.
    wait_left: Duration,
    wait_began: Instant,
    /// Lines that were lost since the last one that was written.
    lost: u64,
    /// Whether the last line lacks its end.
    is_torn: bool,
}

impl State {
    fn new() -> Self {
        Self { wait_left: WAIT, wait_began: Instant::now(), lost: 0, is_torn: false }
    }

    /// Returns whether the file becomes writable in the time that is left.
    fn wait_for(&mut self, file: &impl AsFd) -> io::Result<bool> {
        if is_writable(file, Duration::ZERO)? {
            return Ok(true);
        }
        if self.lost > 0 || self.wait_left.is_zero() {
            return Ok(false);
        }
        let began = Instant::now();
        let is_writable = is_writable(file, self.wait_left)?;
        self.wait_left = self.wait_left.saturating_sub(began.elapsed());
        Ok(is_writable)
    }
}

fn is_writable(file: &impl AsFd, wait: Duration) -> io::Result<bool> {
    let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
    let mut files = [PollFd::new(file, PollFlags::OUT)];
    Ok(retry_on_intr(|| poll(&mut files, Some(&wait)))? > 0)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Written,
    Lost,
}

impl<F: AsFd> Stream<F> {
    pub(super) fn new(file: F) -> Self {
        let piece_bytes = if file.as_fd().is_terminal() { TERMINAL_BYTES } else { PIPE_BYTES };
        Self { file, piece_bytes, state: Mutex::new(State::new()) }
    }

    /// Writes a line, after a notice if lines before it were lost. Counts the line if it cannot be written.
    pub(super) fn write(&self, line: &[u8], notice: Notice) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.wait_began.elapsed() >= WAIT_INTERVAL {
            (state.wait_left, state.wait_began) = (WAIT, Instant::now());
        }
        if state.lost > 0 {
            let notice = notice(state.lost);
            if self.write_line(&mut state, notice.as_bytes())? == Outcome::Lost {
                state.lost += 1;
                return Ok(());
            }
            state.lost = 0;
        }
        if self.write_line(&mut state, line)? == Outcome::Lost {
            state.lost += 1;
        }
        Ok(())
    }

    fn write_line(&self, state: &mut State, line: &[u8]) -> io::Result<Outcome> {
        let text = if state.is_torn { [b"\n", line].concat() } else { line.to_vec() };
        let mut rest = text.as_slice();
        let outcome = self.write_pieces(state, &mut rest);
        if rest.len() < text.len() {
            state.is_torn = !rest.is_empty();
        }
        outcome
    }

    /// Writes as much as possible; `rest` is then what was not written.
    fn write_pieces(&self, state: &mut State, rest: &mut &[u8]) -> io::Result<Outcome> {
        while !rest.is_empty() {
            if !state.wait_for(&self.file)? {
                return Ok(Outcome::Lost);
            }
            let piece = &rest[..rest.len().min(self.piece_bytes)];
            // Not through the standard library, whose lock another thread may hold while it waits for the reader.
            match retry_on_intr(|| rustix::io::write(&self.file, piece)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => *rest = &rest[written..],
                // Another process may have made the pipe non-blocking, and filled it.
                Err(Errno::AGAIN) => return Ok(Outcome::Lost),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Outcome::Written)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read as _};

    use super::*;

    fn notice(lost: u64) -> String {
        format!("{lost} lost\n")
    }

    fn line(bytes: usize) -> Vec<u8> {
        let mut line = vec![b'x'; bytes];
        line[bytes - 1] = b'\n';
        line
    }

    /// Returns a stream to a pipe that is full of lines, after one more was lost, and the number of bytes in the pipe.
    fn full(line: &[u8]) -> (PipeReader, Stream<PipeWriter>, usize) {
        let (reader, writer) = io::pipe().unwrap();
        let stream = Stream::new(writer);
        let mut bytes = 0;
        loop {
            stream.write(line, notice).unwrap();
            if stream.state.lock().lost > 0 {
                return (reader, stream, bytes);
            }
            bytes += line.len();
        }
    }

    #[test]
    fn lines_that_nobody_reads_are_lost_and_counted() {
        let line = line(1_000);
        let (mut reader, stream, bytes) = full(&line);
        for _ in 0..2 {
            stream.write(&line, notice).unwrap();
        }
        reader.read_exact(&mut vec![0; bytes]).unwrap();
        stream.write(b"after\n", notice).unwrap();
        stream.write(b"last\n", notice).unwrap();
        drop(stream);
        assert_eq!(io::read_to_string(reader).unwrap(), "3 lost\nafter\nlast\n");
    }

    /// A reader that takes something now and then would otherwise make each line wait.
    #[test]
    fn lines_wait_for_a_limited_time_together() {
        let line = line(PIPE_BYTES);
        let (_reader, stream, _) = full(&line);
        let mut state = stream.state.lock();
        assert_eq!(state.wait_left, Duration::ZERO);
        state.lost = 0;
        assert!(!state.wait_for(&stream.file).unwrap());
    }

    #[test]
    fn notice_after_a_torn_line_begins_a_new_one() {
        let (mut reader, stream, bytes) = full(&line(PIPE_BYTES));
        // Two pages: one for the notice with a line, one for the first piece of the next line.
        reader.read_exact(&mut vec![0; 2 * PIPE_BYTES]).unwrap();
        stream.write(b"after\n", notice).unwrap();
        stream.write(&line(2 * PIPE_BYTES), notice).unwrap();
        let full_lines = bytes - 2 * PIPE_BYTES;
        reader.read_exact(&mut vec![0; full_lines]).unwrap();
        stream.write(b"last\n", notice).unwrap();
        drop(stream);
        let torn = "x".repeat(PIPE_BYTES);
        assert_eq!(io::read_to_string(reader).unwrap(), format!("1 lost\nafter\n{torn}\n1 lost\nlast\n"));
    }

    #[test]
    fn reader_that_has_ended_is_an_error() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert_eq!(Stream::new(writer).write(b"x\n", notice).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
