//! A table of text.

use crate::text::cut;

/// A table, or a list of properties if it has no column names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Table {
    pub title: String,
    pub columns: &'static [Column],
    pub rows: Vec<Vec<String>>,
    /// Printed instead of the rows.
    pub note: Option<String>,
}

/// The heading and the layout of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    /// As wide as its longest cell, aligned to the right.
    Number(&'static str),
    /// As wide as its longest cell.
    Text(&'static str),
    /// Takes the rest of the width; longer cells are cut.
    Fill(&'static str),
}

impl Column {
    fn heading(self) -> &'static str {
        match self {
            Self::Number(heading) | Self::Text(heading) | Self::Fill(heading) => heading,
        }
    }
}

/// Columns between two cells.
const GAP: usize = 2;

impl Table {
    /// Returns the number of lines before the rows.
    pub fn head_lines(&self) -> usize {
        usize::from(self.note.is_none() && self.columns.iter().any(|column| !column.heading().is_empty()))
    }

    /// Returns the heading and the rows.
    pub fn lines(&self, width: usize) -> Vec<String> {
        if let Some(note) = &self.note {
            return vec![cut(note, width)];
        }
        let headings: Vec<String> = self.columns.iter().map(|column| column.heading().to_owned()).collect();
        let head = (self.head_lines() > 0).then_some(&headings);
        let widths = self.widths(width);
        head.into_iter().chain(&self.rows).map(|row| self.line(row, &widths, width)).collect()
    }

    fn widths(&self, width: usize) -> Vec<usize> {
        let natural = |number: usize, column: &Column| {
            let cells = self.rows.iter().filter_map(|row| row.get(number)).map(|cell| cell.chars().count());
            cells.chain([column.heading().chars().count()]).max().unwrap_or_default()
        };
        let mut widths: Vec<usize> =
            self.columns.iter().enumerate().map(|(number, column)| natural(number, column)).collect();
        let others: usize = (self.columns.iter().zip(&widths))
            .map(|(column, width)| if matches!(column, Column::Fill(_)) { 0 } else { *width })
            .sum();
        let free = width.saturating_sub(others + GAP * self.columns.len().saturating_sub(1));
        for (column, width) in self.columns.iter().zip(&mut widths) {
            if matches!(column, Column::Fill(_)) {
                *width = free;
            }
        }
        widths
    }

    fn line(&self, row: &[String], widths: &[usize], width: usize) -> String {
        let cells: Vec<String> = (self.columns.iter().zip(row).zip(widths))
            .map(|((column, cell), width)| match column {
                Column::Number(_) => format!("{cell:>width$}"),
                Column::Text(_) => format!("{cell:width$}"),
                Column::Fill(_) => format!("{:width$}", cut(cell, *width)),
            })
            .collect();
        cut(cells.join(&" ".repeat(GAP)).trim_end(), width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_aligned_and_cut() {
        let mut table = Table {
            columns: &[Column::Fill("KEY"), Column::Number("N"), Column::Text("CODE")],
            rows: vec![vec!["abcdefghij".into(), "1".into(), "OK".into()], vec!["b".into(), "100".into(), "x".into()]],
            ..Table::default()
        };
        assert_eq!(table.lines(16), ["KEY      N  CODE", "abcd~    1  OK", "b      100  x"]);
        assert_eq!(table.lines(6), ["    N~", "    1~", "  100~"]);
        table.note = Some("nothing here".to_owned());
        assert_eq!(table.lines(5), ["noth~"]);
    }
}
