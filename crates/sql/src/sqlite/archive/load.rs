//! Fills a new file of an archive.

use std::path::{Path, PathBuf};

use orlop_core::{
    log::{ArchivePart, ArchivedMoment, ArchivedRow, Error, Result},
    types::Revision,
};
use rusqlite::Connection;

use super::file::archive_file;
use crate::{
    archive::counted_bytes,
    migrations,
    sqlite::{
        append::{Row, SUB, bind},
        load::{Complete, Scratch, with_suffix},
    },
};

const INSERT: &str = "INSERT INTO kv_archive (id, key, value, lease, version, create_revision, prev_revision, deleted, sub, \
    end_revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
/// The parameter `end_revision`.
const END: usize = 10;
const INSERT_MOMENT: &str = "INSERT INTO kv_time (id, at, gap, back) \
    VALUES (?1, ?2, ?3, coalesce((SELECT at FROM kv_time ORDER BY id DESC LIMIT 1) > ?2, 0))";
const INSERT_FACT: &str = "INSERT INTO meta (name, value) VALUES (?, ?)";

/// The file of an archive beside a database that is being filled.
pub(in crate::sqlite) struct Loader {
    scratch: Scratch,
    first: Revision,
    copied: Revision,
    rows: u64,
    bytes: u64,
}

impl Loader {
    pub(in crate::sqlite) async fn new(database: &Path, first: Revision, copied: Revision) -> Result<Self> {
        let scratch = Scratch::new(&archive_file(database), &migrations::sqlite_archive()).await?;
        Ok(Self { scratch, first, copied, rows: 0, bytes: 0 })
    }

    /// Returns the files of a database's archive.
    pub(in crate::sqlite) fn files(database: &Path) -> [PathBuf; 3] {
        let file = archive_file(database);
        [with_suffix(&file, "-wal"), with_suffix(&file, "-shm"), file]
    }

    pub(in crate::sqlite) async fn add(&mut self, part: ArchivePart) -> Result<()> {
        match part {
            ArchivePart::Begin { .. } => Err(Error::Corrupt("the archive begins twice".to_owned())),
            ArchivePart::Rows(rows) => {
                self.rows += rows.len() as u64;
                self.bytes += rows.iter().map(|row| counted_bytes(&row.change)).sum::<u64>();
                self.scratch.run(move |connection| add_rows(connection, &rows)).await
            }
            ArchivePart::Moments(moments) => {
                self.scratch.run(move |connection| add_moments(connection, &moments)).await
            }
        }
    }

    /// Completes the archive of the database with this cluster ID. The file still has its temporary name.
    pub(in crate::sqlite) async fn finish(mut self, cluster: i64) -> Result<Complete> {
        let facts = [
            ("cluster_id", cluster),
            ("first_revision", self.first.0),
            ("copied_revision", self.copied.0),
            ("bytes", self.bytes.cast_signed()),
            ("rows", self.rows.cast_signed()),
        ];
        let add_facts = move |connection: &mut Connection| {
            for fact in facts {
                connection.execute(INSERT_FACT, fact)?;
            }
            connection.execute_batch("COMMIT")
        };
        self.scratch.run(add_facts).await?;
        self.scratch.complete()
    }
}

fn add_rows(connection: &mut Connection, rows: &[ArchivedRow]) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(INSERT)?;
    for ArchivedRow { change, end } in rows {
        bind(&mut statement, &Row::of(change))?;
        statement.raw_bind_parameter(SUB, change.row.sub)?;
        statement.raw_bind_parameter(END, end.0)?;
        statement.raw_execute()?;
    }
    Ok(())
}

fn add_moments(connection: &mut Connection, moments: &[ArchivedMoment]) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(INSERT_MOMENT)?;
    for ArchivedMoment { moment, has_gap } in moments {
        statement.execute((moment.revision.0, moment.unix_ms, *has_gap))?;
    }
    Ok(())
}
