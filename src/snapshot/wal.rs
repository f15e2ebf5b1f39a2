//! The write-ahead log (WAL) of an etcd: its entries, and whether all of them are there.
//!
//! The WAL is a folder of files named `SEQ-INDEX.wal`, both numbers in hexadecimal: SEQ counts the files, INDEX is that
//! of the first entry that was written to the file. etcd deletes the oldest files.
//!
//! A file is a sequence of records, each a `walpb.Record` behind its length in 8 bytes, little-endian: the lower 56
//! bits are the length; if the highest bit is set, the lower 3 bits of the last byte are the number of bytes that
//! follow to fill up. A length of 0 ends the file, which etcd creates longer than its content. The first record of a
//! file repeats the checksum of the files before it.
//!
//! A crash may interrupt the last write, which was not acknowledged then. Any other damage may hide acknowledged
//! requests. etcd tells the two apart in the same way.

use std::{
    collections::BTreeMap,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use prost::Message as _;

use super::{Error, Result, file_error};

/// Kinds of records (`walpb.Record.type`).
const METADATA: i64 = 1;
const ENTRY: i64 = 2;
const STATE: i64 = 3;
const CHECKSUM: i64 = 4;
const SNAPSHOT: i64 = 5;
/// Bytes of a record's length.
const LENGTH_BYTES: usize = 8;
/// Bytes that a disk writes completely or not at all.
const SECTOR_BYTES: usize = 512;

/// `walpb.Record`.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int64, tag = "1")]
    kind: i64,
    /// The CRC-32C of the data of all records up to this one.
    #[prost(uint32, tag = "2")]
    checksum: u32,
    #[prost(bytes = "bytes", tag = "3")]
    data: Bytes,
}

/// `raftpb.Entry`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Entry {
    #[prost(uint64, tag = "1")]
    pub(super) kind: u64,
    #[prost(uint64, tag = "3")]
    pub(super) index: u64,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) data: Bytes,
}

/// A file of the WAL.
struct WalFile {
    seq: u64,
    /// The index of the first entry that was written to it.
    first: u64,
    path: PathBuf,
}

/// Why a file cannot be read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// The last write was interrupted.
    Torn,
    Damaged,
}

/// Returns the entries after the index `applied`, by their index.
///
/// # Errors
///
/// If the folder may lack one of them.
pub(super) fn entries_after(folder: &Path, applied: u64) -> Result<BTreeMap<u64, Entry>> {
    let lacks = |what: String| Error::File(format!("the WAL in {} {what}", folder.display()));
    let files = needed(files(folder)?, applied).map_err(lacks)?;
    let (mut entries, mut checksum) = (BTreeMap::new(), None);
    for (number, WalFile { path, .. }) in (1..).zip(&files) {
        let bytes = fs::read(path).map_err(|error| file_error("read", path, &error))?;
        let read = read_entries(&bytes.into(), &mut checksum, |entry| {
            // An entry replaces those at its index and after it, which no majority had.
            entries.split_off(&entry.index);
            if entry.index > applied {
                entries.insert(entry.index, entry);
            }
        });
        match read {
            Ok(()) => {}
            Err(Broken::Torn) if number == files.len() => {}
            Err(Broken::Torn | Broken::Damaged) => return Err(lacks(format!("is damaged: file {}", path.display()))),
        }
    }
    Ok(entries)
}

fn files(folder: &Path) -> Result<Vec<WalFile>> {
    let unreadable = |error: io::Error| file_error("read", folder, &error);
    let mut files = Vec::new();
    for file in fs::read_dir(folder).map_err(unreadable)? {
        let path = file.map_err(unreadable)?.path();
        files.extend(numbers(&path).map(|(seq, first)| WalFile { seq, first, path }));
    }
    Ok(files)
}

/// Returns the numbers in the name of a file of the WAL; `None` if it is another file.
fn numbers(path: &Path) -> Option<(u64, u64)> {
    let (seq, first) = path.file_name()?.to_str()?.strip_suffix(".wal")?.split_once('-')?;
    Some((u64::from_str_radix(seq, 16).ok()?, u64::from_str_radix(first, 16).ok()?))
}

/// Returns the files with the entries after the index `applied`, in order.
///
/// # Errors
///
/// What the WAL lacks.
fn needed(mut files: Vec<WalFile>, applied: u64) -> std::result::Result<Vec<WalFile>, String> {
    if files.is_empty() {
        return Err("has no files".to_owned());
    }
    files.sort_unstable_by_key(|file| file.seq);
    let next = applied.saturating_add(1);
    // When a file begins, the entries from its first one on are in no file before it, or are replaced.
    let Some(start) = files.iter().rposition(|file| file.first <= next) else {
        return Err(format!("lacks the file with entry {next}, the next one after those that the database has"));
    };
    files.drain(..start);
    match files.windows(2).find(|pair| pair[1].seq - pair[0].seq != 1) {
        Some(pair) => Err(format!("lacks the file after {}", pair[0].path.display())),
        None => Ok(files),
    }
}

/// Reads the entries of a file. `checksum` is that of the files before it, if they were read, and becomes that of this
/// one.
fn read_entries(
    file: &Bytes,
    checksum: &mut Option<u32>,
    mut take: impl FnMut(Entry),
) -> std::result::Result<(), Broken> {
    let mut at = 0;
    loop {
        // A file gets its name when its first record is on disk.
        let or_damaged = |broken| if at == 0 { Broken::Damaged } else { broken };
        let Some((record, end)) = record_at(file, at).map_err(or_damaged)? else { break };
        let torn_or_damaged = || {
            let is_torn = has_empty_sector(file, at + LENGTH_BYTES..end);
            or_damaged(if is_torn { Broken::Torn } else { Broken::Damaged })
        };
        let record = Record::decode(file.slice(record)).map_err(|_| torn_or_damaged())?;
        if record.kind == CHECKSUM {
            if checksum.is_some_and(|before| before != record.checksum) {
                return Err(Broken::Damaged);
            }
            *checksum = Some(record.checksum);
        } else {
            let before = checksum.filter(|_| at > 0).ok_or(Broken::Damaged)?;
            let with_data = crc32c::crc32c_append(before, &record.data);
            if record.checksum != with_data {
                return Err(torn_or_damaged());
            }
            *checksum = Some(with_data);
            match record.kind {
                ENTRY => take(Entry::decode(record.data).map_err(|_| Broken::Damaged)?),
                METADATA | STATE | SNAPSHOT => {}
                _ => return Err(Broken::Damaged),
            }
        }
        at = end;
    }
    if at == 0 { Err(Broken::Damaged) } else { Ok(()) }
}

/// Returns the place of the record whose length is at `at`, and that of the next length; `None` at the file's end.
fn record_at(file: &[u8], at: usize) -> std::result::Result<Option<(Range<usize>, usize)>, Broken> {
    let rest = &file[at..];
    if rest.is_empty() {
        return Ok(None);
    }
    let field: [u8; LENGTH_BYTES] = *rest.first_chunk().ok_or(Broken::Torn)?;
    if field == [0; LENGTH_BYTES] {
        return Ok(None);
    }
    let fill = if field[7] >> 7 == 1 { usize::from(field[7] & 7) } else { 0 };
    let start = at + LENGTH_BYTES;
    let len = usize::try_from(u64::from_le_bytes(field) & (u64::MAX >> 8)).map_err(|_| Broken::Torn)?;
    let record_end = start.checked_add(len).ok_or(Broken::Torn)?;
    let end = record_end.checked_add(fill).filter(|end| *end <= file.len()).ok_or(Broken::Torn)?;
    Ok(Some((start..record_end, end)))
}

/// Returns whether all bytes of a sector, as far as they are in `range`, are 0.
fn has_empty_sector(file: &[u8], range: Range<usize>) -> bool {
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min((start / SECTOR_BYTES + 1) * SECTOR_BYTES);
        if file[start..end].iter().all(|byte| *byte == 0) {
            return true;
        }
        start = end;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(record: &Record) -> Vec<u8> {
        let data = record.encode_to_vec();
        let fill = (8 - data.len() % 8) % 8;
        let mut field = data.len() as u64;
        if fill > 0 {
            field |= (0x80 | fill as u64) << 56;
        }
        [&field.to_le_bytes()[..], &data, &vec![0; fill]].concat()
    }

    /// Returns a file whose entries have the indexes from `first` on. `checksum` is that of the files before it, and
    /// becomes that of this one.
    fn wal(checksum: &mut u32, first: u64, requests: &[&'static [u8]]) -> Vec<u8> {
        let mut file = frame(&Record { kind: CHECKSUM, checksum: *checksum, data: Bytes::new() });
        for (index, data) in (first..).zip(requests) {
            let data = Bytes::from(Entry { kind: 0, index, data: Bytes::from_static(data) }.encode_to_vec());
            *checksum = crc32c::crc32c_append(*checksum, &data);
            file.extend(frame(&Record { kind: ENTRY, checksum: *checksum, data }));
        }
        file
    }

    fn read(file: Vec<u8>) -> (Vec<Entry>, std::result::Result<(), Broken>) {
        let mut entries = Vec::new();
        let end = read_entries(&file.into(), &mut None, |entry| entries.push(entry));
        (entries, end)
    }

    #[test]
    fn interrupted_write_is_told_from_damage() {
        // The last record begins in the first sector and ends in the fifth one.
        let whole = wal(&mut 7, 1, &[b"", b"\x08\x01", &[1; 2_000]]);
        let changed = |places: Range<usize>, byte: u8| {
            let mut changed = whole.clone();
            changed[places].fill(byte);
            changed
        };
        let (torn, damaged) = (Err(Broken::Torn), Err(Broken::Damaged));
        for (name, file, entries, end) in [
            ("zeros after the end", [&whole[..], &[0; 100]].concat(), 3, Ok(())),
            ("the end of the file", whole.clone(), 3, Ok(())),
            ("a part of a record", whole[..whole.len() - 5].to_vec(), 2, torn),
            ("a part of a length", [&whole[..], &[9; 3]].concat(), 3, torn),
            ("a sector that was not written", changed(1_024..1_536, 0), 2, torn),
            ("sectors to the end that were not written", changed(512..whole.len(), 0), 2, torn),
            ("a part of a sector", changed(1_024..1_535, 0), 2, damaged),
            ("another byte", changed(1_100..1_101, 7), 2, damaged),
            ("another checksum before the records", changed(11..12, 8), 0, damaged),
            ("garbage", vec![0xff; 64], 0, damaged),
            ("nothing but zeros", vec![0; 64], 0, damaged),
            ("an empty file", vec![], 0, damaged),
            ("no checksum at the beginning", whole[16..].to_vec(), 0, damaged),
        ] {
            let (read, found) = read(file);
            assert_eq!((read.len(), found), (entries, end), "{name}");
        }
    }

    #[test]
    fn no_entry_is_lost_unnoticed() {
        let whole = wal(&mut 7, 1, &[b"", b"\x08\x01", b"\x12\x00"]);
        let (all, _) = read(whole.clone());
        // All entries before the damage are read, and none after it.
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] = !damaged[place];
            let (read, end) = read(damaged);
            assert!(read.iter().eq(all.iter().take(read.len())), "byte {place}");
            assert!(read.len() == all.len() || end.is_err(), "byte {place}");
        }
    }

    #[test]
    fn missing_and_damaged_files_are_noticed() {
        let mut checksum = 0;
        let first = wal(&mut checksum, 1, &[b"1", b"2"]);
        let second = wal(&mut checksum, 3, &[b"3", b"4"]);
        let third = wal(&mut checksum, 5, &[b"5"]);
        let cut = |file: &[u8]| file[..file.len() - 3].to_vec();
        let flipped = |file: &[u8]| {
            let mut file = file.to_vec();
            file[32] ^= 1;
            file
        };
        let (one, two, three) = ((0_u64, 0_u64, first.clone()), (1, 3, second.clone()), (2, 5, third.clone()));
        let gap = (3, 5, third.clone());
        for (files, applied, want) in [
            (vec![one.clone(), two.clone(), three.clone()], 0, Ok(5)),
            (vec![one.clone(), two.clone(), three.clone()], 3, Ok(2)),
            (vec![one.clone(), two.clone(), (2, 5, cut(&third))], 0, Ok(4)),
            (vec![two.clone(), three.clone()], 2, Ok(3)),
            // Entries that the database has are not needed.
            (vec![(0, 0, flipped(&first)), two.clone(), three.clone()], 2, Ok(3)),
            (vec![(0, 0, flipped(&first)), two.clone()], 1, Err("is damaged")),
            (vec![one.clone(), (1, 3, cut(&second)), three.clone()], 0, Err("is damaged")),
            (vec![one.clone(), (1, 3, vec![]), three.clone()], 0, Err("is damaged")),
            (vec![one.clone(), two.clone(), (2, 5, vec![])], 0, Err("is damaged")),
            (vec![one.clone(), (1, 5, third)], 0, Err("is damaged")),
            (vec![one, two.clone(), gap], 0, Err("lacks the file after")),
            (vec![two, three], 1, Err("lacks the file with entry 2")),
            (vec![], 0, Err("has no files")),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let names = files.iter().map(|(seq, first, _)| format!("{seq:016x}-{first:016x}.wal"));
            let names: Vec<String> = names.collect();
            for (name, (.., bytes)) in names.iter().zip(&files) {
                fs::write(folder.path().join(name), bytes).expect("a file can be written");
            }
            for other in ["0.tmp", "0000000000000009-0000000000000000.wal.broken", "other.wal"] {
                fs::write(folder.path().join(other), "other").expect("a file can be written");
            }
            match (entries_after(folder.path(), applied), want) {
                (Ok(entries), Ok(want)) => assert_eq!(entries.len(), want, "{names:?} after {applied}"),
                (Err(error), Err(want)) => assert!(error.to_string().contains(want), "{names:?}: {error}"),
                (found, want) => panic!("{names:?} after {applied}: {found:?} instead of {want:?}"),
            }
        }
    }
}
