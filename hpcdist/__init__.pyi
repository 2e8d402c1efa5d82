from hpcdist.config.loading import load_config as load_config
from hpcdist.config.schema import Config as Config
from hpcdist.rank.context import Context as Context
from hpcdist.rank.script_api import agree_among as agree_among
from hpcdist.rank.script_api import checkpoint_dir as checkpoint_dir
from hpcdist.rank.script_api import log as log
from hpcdist.rank.script_api import should_save as should_save
from hpcdist.rank.script_api import should_stop as should_stop

__version__: str
